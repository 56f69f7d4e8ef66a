"""One token from each row of logits: temperature, min_p, top_k, top_p, then an exact draw.

Probabilities are whole numbers here: a token's weight is its probability relative to the most likely token,
in units of 2**-40, rounded down. Integer sums are exact, so the nucleus and the draw cannot depend on the
order in which a device, a thread count or a batch adds them up. What the rounding loses are tokens a million
million times less likely than the best one.

All else that is done to a whole row is done to each logit alone or is a maximum: torch promises no equal bits
between a floating-point sum over one row and over many (`sum` and `logsumexp` on the CPU do differ), and a
request's tokens must not depend on its batch-mates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from legato.sampling_params import SamplingParams

_ONE = 1 << 40
_COLDEST = 1e-30  # Below it fp32 division gives 0 / 0; here already only the highest logits have weight.
_FIRST_LOOK, _WIDER = 128, 8  # Most nuclei are narrower than this; a wider one is rare, and not dear.
_BLOCK = 32
_SMALL = 8192  # So many are ranked at once; finding the best blocks first would take as long.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """R rows that take the same path."""

    logits: Tensor
    """[R, V] fp32."""
    peaks: Tensor
    """[R, 1]: the highest logit of each, finite."""
    params: Sequence[SamplingParams]
    randoms: Sequence[int]

    def take(self, picks: Sequence[int]) -> "_Rows":
        return _Rows(
            logits=take_rows(self.logits, picks),
            peaks=take_rows(self.peaks, picks),
            params=[self.params[i] for i in picks],
            randoms=[self.randoms[i] for i in picks],
        )

    def targets(self, totals: Tensor) -> Tensor:
        """[R, 1]: where in 0 .. total ([R, 1] int64) each random number points."""
        pairs = zip(self.randoms, totals.squeeze(1).tolist(), strict=True)
        return torch.tensor([[random * total >> 64] for random, total in pairs], device=totals.device)


def draw(logits: Tensor, params: SamplingParams, random: int) -> int:
    """Draw an id from `logits` ([V] fp32, the highest finite) with `random`, uniform in [0, 2**64).

    The order is vLLM's: temperature, min_p, top_k, top_p; each later rule sees the distribution that the
    earlier ones left, so top_p is a share of what top_k kept. The most likely token passes every rule.
    """
    return draw_rows(logits[None], logits.amax()[None, None], (params,), (random,))[0]


def draw_rows(
    logits: Tensor, peaks: Tensor, params: Sequence[SamplingParams], randoms: Sequence[int]
) -> list[int]:
    """What `draw` gives for each row of `logits` ([R, V], maxima `peaks` [R, 1]), all rows together."""
    vocab = logits.shape[1]
    rows = _Rows(logits=logits, peaks=peaks, params=params, randoms=randoms)
    looks = {i: look for i, p in enumerate(params) if (look := _first_look(p, vocab))}
    tokens = dict[int, int]()
    if whole := [i for i in range(len(params)) if i not in looks]:
        tokens.update(zip(whole, _draw_from_all(rows.take(whole)), strict=True))
    totals = dict.fromkeys(looks, 0)
    if nuclei := [i for i in looks if not _top_k(params[i], vocab)]:
        part = rows.take(nuclei)
        weights = weigh(part.logits, part.peaks, part.params)
        totals.update(zip(nuclei, weights.sum(dim=-1).tolist(), strict=True))
    while looks:
        look = min(looks.values())
        picks = [i for i in looks if looks[i] == look]
        found = _draw_from_best(rows.take(picks), look, [totals[i] for i in picks])
        for i, token in zip(picks, found, strict=True):
            if token is None:
                looks[i] = look * _WIDER
            else:
                tokens[i] = token
                del looks[i]
    return [tokens[i] for i in range(len(params))]


def best(values: Tensor, k: int) -> Tensor:
    """[.., k] ids of the k highest of `values` ([.., V] fp32), best first, the lowest id first among equals;
    all of them if k > V.

    `torch.topk` alone leaves the choice among equals open, and takes twice as long for a few of 262,144.
    """
    size = values.shape[-1]
    k = min(k, size)
    if size <= max(_SMALL, 2 * k * _BLOCK):
        return _rank(values, k)
    # Each of the k best lies in one of the k blocks with the highest maxima, the first ones among equals:
    # else k blocks would each hold a better one.
    blocks = best(_per_block(values, Tensor.amax), k).sort().values
    ids, members = _members(values, blocks, -torch.inf)
    return ids.gather(-1, _rank(members, k))


def weigh(values: Tensor, peaks: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[R, K] int64: floor(2**40 exp((value - peak) / temperature)), 0 where min_p drops the token."""
    temperatures = torch.tensor([[max(p.temperature, _COLDEST)] for p in params], device=values.device)
    # exp2 would be faster, but its last bit depends on where in memory a value lies.
    weights = (values - peaks).div_(temperatures).exp_().mul_(_ONE).long()
    if any(p.min_p > 0 for p in params):
        least = torch.tensor([[math.ceil(p.min_p * _ONE)] for p in params], device=values.device)
        weights.masked_fill_(weights < least, 0)
    return weights


def take_rows(values: Tensor, picks: Sequence[int]) -> Tensor:
    """The rows `picks` (ascending) of `values`: a view if they are neighbours, else a copy."""
    if len(picks) == len(values):
        return values
    if picks[-1] - picks[0] == len(picks) - 1:
        return values[picks[0] : picks[-1] + 1]
    return values[torch.tensor(picks, device=values.device)]


def _top_k(params: SamplingParams, vocab: int) -> int:
    """How many tokens top_k keeps, 0 for all."""
    return params.top_k if params.top_k < vocab else 0


def _first_look(params: SamplingParams, vocab: int) -> int:
    """How many of the best tokens may be enough to draw from; 0 where nothing but min_p drops any.

    Few different numbers, so that rows share them.
    """
    top_k = _top_k(params, vocab)
    if top_k == 0 and params.top_p >= 1:
        return 0
    look = _FIRST_LOOK
    while look < top_k:
        look *= _WIDER
    return look


def _draw_from_all(rows: _Rows) -> list[int]:
    """One id of each row; shares are laid out by id. First the block is found, then the id in it."""
    weights = weigh(rows.logits, rows.peaks, rows.params)
    sums = _per_block(weights, Tensor.sum)
    ends = sums.cumsum(dim=-1)
    targets = rows.targets(ends[:, -1:])
    block = torch.searchsorted(ends, targets, right=True)
    ids, members = _members(weights, block, 0)
    targets -= (ends - sums).gather(1, block)
    drawn = ids.gather(1, torch.searchsorted(members.cumsum(dim=-1), targets, right=True))
    tokens: list[int] = drawn.squeeze(1).tolist()
    return tokens


def _draw_from_best(rows: _Rows, look: int, totals: Sequence[int]) -> list[int | None]:
    """One id of each row, shares laid out best first; None where the nucleus is wider than `look`.

    `totals` are the weights of which top_p is a share; 0 where that is the weight of what top_k keeps.
    """
    device = rows.logits.device
    ids = best(rows.logits, look)
    weights = weigh(rows.logits.gather(1, ids), rows.peaks, rows.params)
    width = ids.shape[1]
    widths = torch.tensor([[min(p.top_k or width, width)] for p in rows.params], device=device)
    weights.masked_fill_(torch.arange(width, device=device) >= widths, 0)
    ends = weights.cumsum(dim=-1)
    total = torch.tensor(totals, device=device)[:, None]
    total = torch.where(total > 0, total, ends[:, -1:])
    top_p = torch.tensor([[p.top_p] for p in rows.params], dtype=torch.float64, device=device)
    share = (top_p * total).ceil().long().clamp(min=1).minimum(total)  # fp64 may round past the total,
    needed = torch.where(top_p < 1, share, total)  # or below it
    last = torch.searchsorted(ends, needed)
    missing = (last == width).squeeze(1).tolist()
    kept = ends.gather(1, last.clamp(max=width - 1))
    drawn = ids.gather(1, torch.searchsorted(ends, rows.targets(kept), right=True).clamp(max=width - 1))
    return [None if short else token for token, short in zip(drawn.squeeze(1).tolist(), missing, strict=True)]


def _rank(values: Tensor, k: int) -> Tensor:
    """`best` by keys without equals: 32 bits of value above 32 bits of id, counted down."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats that they encode
    last = values.shape[-1] - 1
    keys = (ordered.long() << 32) | torch.arange(last, -1, -1, device=values.device)
    return last - (_largest(keys, k) & 0xFFFFFFFF)


def _largest(keys: Tensor, k: int) -> Tensor:
    """The k highest of each row of `keys`, descending."""
    if keys.device.type != "cpu":
        return keys.topk(k).values
    # numpy sorts with a CPU's vector instructions, in a tenth of torch's time.
    start = keys.shape[-1] - k
    part = np.partition(keys.numpy(), min(start, keys.shape[-1] - 1))[..., start:]
    return torch.from_numpy(np.sort(part)).flip(-1)


def _per_block(values: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """`reduce` each block of 32 neighbours of `values` ([.., V]); the last one may be shorter."""
    whole = values.shape[-1] // _BLOCK * _BLOCK
    parts = [reduce(values[..., :whole].view(*values.shape[:-1], whole // _BLOCK, _BLOCK), -1)]
    if whole < values.shape[-1]:
        parts.append(reduce(values[..., None, whole:], -1))
    return torch.cat(parts, dim=-1)


def _members(values: Tensor, blocks: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """[.., B * 32] ids in `blocks` ([.., B]), and their values; `fill` past the end of `values`."""
    size = values.shape[-1]
    ids = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK, device=values.device)).flatten(-2)
    return ids, values.gather(-1, ids.clamp(max=size - 1)).masked_fill_(ids >= size, fill)
