"""From logits to tokens: each row by its own request's parameters, and nothing else.

The order of steps is vLLM's, and each has its reason:

    1. log-probabilities    of the model's own distribution, so they are the same whatever the client bends
    2. bias, stop ban, penalties, constraint (`adjust`)     can change which token is best: greedy needs them
    3. greedy: the highest logit, the lowest id among equals
    4. else temperature, min_p, top_k, top_p, draw (`draw`)     never change which token is best

Same logits row, same parameters, same index give the same token, bit for bit, alone or in any batch. This
file does not know where logits come from, and it keeps no state between calls.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from legato.core.lifecycle import FinishReason
from legato.core.step_plan import SampleRow, SamplingFailure, TokenLogprobs
from legato.errors import ConstraintError
from legato.runner.adjust import adjust_rows, forbid_others, is_adjusted
from legato.runner.draw import best, draw_rows, take_rows
from legato.runner.random import random64

_CPU_TILE, _GPU_TILE = 1 << 20, 1 << 26
"""Logits that are worked on at once: what a CPU's caches hold, what leaves a GPU's memory to the model."""

_PLAIN_GREEDY = (False, True)


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[TokenLogprobs | SamplingFailure, ...]:
    """One token per row of `logits` ([R, V] fp32, left as it is); every `params.seed` is set.

    Rows that are greedy and ask for nothing else cost one argmax for all of them together, and each other
    operation runs once for all rows that need it. Ids in parameters and histories are below V: that is
    checked where requests enter.

    A row whose constraint fails, that contains NaN or +inf, or that has no token left to choose, gets a
    `SamplingFailure`. The other rows are not affected.
    """
    groups: dict[tuple[bool, bool], list[int]] = {}
    results: dict[int, TokenLogprobs | SamplingFailure] = {}
    masks: dict[int, bytes | None] = {}
    for i, row in enumerate(rows):
        try:
            masks[i] = row.allowed()
        except ConstraintError as error:
            results[i] = SamplingFailure(FinishReason.CONSTRAINT, error.message)
        else:
            groups.setdefault((is_adjusted(row), row.params.greedy), []).append(i)
    for kind, group in groups.items():
        for picks in [group] if kind == _PLAIN_GREEDY else tiles(group, logits):
            drawn = _choose(take_rows(logits, picks), [rows[i] for i in picks], [masks[i] for i in picks])
            results.update(zip(picks, drawn, strict=True))
    asked = {
        i: (sampled.token, k)
        for i, sampled in results.items()
        if (k := rows[i].params.logprobs) is not None and isinstance(sampled, TokenLogprobs)
    }
    for picks in tiles(sorted(asked), logits):
        chosen = [asked[i] for i in picks]
        results.update(zip(picks, report(take_rows(logits, picks), chosen), strict=True))
    return tuple(results[i] for i in range(len(rows)))


def tiles(picks: Sequence[int], logits: Tensor) -> Iterator[Sequence[int]]:
    """`picks` in groups whose logits together are few enough to be worked on at once."""
    height = max(1, (_CPU_TILE if logits.device.type == "cpu" else _GPU_TILE) // logits.shape[1])
    return (picks[i : i + height] for i in range(0, len(picks), height))


def _choose(
    logits: Tensor, rows: Sequence[SampleRow], masks: Sequence[bytes | None]
) -> Iterator[TokenLogprobs | SamplingFailure]:
    """The results of rows that are all adjusted or all not, and all greedy or all drawn."""
    failures: dict[int, SamplingFailure] = {}
    if is_adjusted(rows[0]):
        failures = _failures(logits.amax(dim=-1))
        logits = adjust_rows(logits, rows)
        for line, mask in zip(logits, masks, strict=True):
            if mask is not None:
                forbid_others(line, mask)
    if rows[0].params.greedy:
        highest = _argmax(logits)
        failures |= _failures(logits.gather(1, highest).squeeze(1))
        tokens = iter(highest.squeeze(1).tolist())
        return (failures.get(i) or TokenLogprobs(token) for i, token in enumerate(tokens))
    peaks = logits.amax(dim=-1, keepdim=True)
    failures |= _failures(peaks.squeeze(1))
    sound = [i for i in range(len(rows)) if i not in failures]
    if failures:
        logits, peaks = logits[sound], peaks[sound]
    randoms = [random64(_seed(rows[i]), rows[i].num_generated) for i in sound]
    drawn = iter(draw_rows(logits, peaks, [rows[i].params for i in sound], randoms) if sound else ())
    return (failures.get(i) or TokenLogprobs(next(drawn)) for i in range(len(rows)))


def _argmax(logits: Tensor) -> Tensor:
    """[R, 1]: the id of the highest of each row of `logits`, the lowest among equals; NaN is highest."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1, keepdim=True)
    # numpy compares with a CPU's vector instructions, in a fraction of torch's time.
    return torch.from_numpy(logits.detach().numpy().argmax(axis=-1, keepdims=True))


def report(logits: Tensor, chosen: Sequence[tuple[int, int]]) -> Iterator[TokenLogprobs]:
    """Each row's token with log-probabilities: its own and those of the row's best ids. `chosen` are pairs of
    the token and the number of best ids that are asked for."""
    asked = [num_top for _, num_top in chosen]
    tokens = torch.tensor([[token] for token, _ in chosen], device=logits.device)
    ids = torch.cat((tokens, best(logits, max(asked))), dim=1)
    logprobs = logits.log_softmax(dim=-1).gather(1, ids)
    for k, (token, *top), (logprob, *others) in zip(asked, ids.tolist(), logprobs.tolist(), strict=True):
        yield TokenLogprobs(token, logprob, tuple(zip(top[:k], others[:k], strict=True)))


def _seed(row: SampleRow) -> int:
    assert row.params.seed is not None
    return row.params.seed


def _failures(peaks: Tensor) -> dict[int, SamplingFailure]:
    """The rows with no finite maximum, by index. A maximum propagates NaN, so the highest logits ([R]) cover
    NaN, +inf and all -inf."""
    return {
        i: SamplingFailure(FinishReason.ERROR, f"no token can be chosen, the highest logit is {peak}")
        for i, peak in enumerate(peaks.tolist())
        if not math.isfinite(peak)
    }
