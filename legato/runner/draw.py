"""One token from one row of logits: temperature, min_p, top_k, top_p, then an exact draw.

Probabilities are whole numbers here: a token's weight is its probability relative to the most likely token,
in units of 2**-40, rounded down. Integer sums are exact, so the nucleus and the draw cannot depend on the
order in which a device, a thread count or a batch adds them up. What the rounding loses are tokens a million
million times less likely than the best one.

A row is always worked on alone, as a [V] vector. Torch promises no equal bits between a reduction over one
row and over many (and `sum` and `logsumexp` on the CPU do differ), and a request's tokens must not depend on
its batch-mates.
"""

import math

import torch
from torch import Tensor

from legato.core.request import SamplingParams

_ONE = 1 << 40
_COLDEST = 1e-30  # Below it fp32 division gives 0 / 0; here already only the highest logits have weight.
_FIRST_LOOK = 1024  # A nucleus is rarely wider, and sorting a whole vocabulary takes 30 times as long.


def draw(logits: Tensor, params: SamplingParams, random: int) -> int:
    """Draw an id from `logits` ([V] fp32, the highest finite) with `random`, uniform in [0, 2**64).

    The order is vLLM's: temperature, min_p, top_k, top_p; each later rule sees the distribution that the
    earlier ones left, so top_p is a share of what top_k kept. The most likely token passes every rule.
    """
    weights = _weights(logits, params)
    kept = _kept(logits, weights, params)
    cumulative = (weights if kept is None else weights[kept]).cumsum(0)
    target = random * int(cumulative[-1]) >> 64
    place = int(torch.searchsorted(cumulative, target, right=True))
    return place if kept is None else int(kept[place])


def best(values: Tensor, k: int) -> Tensor:
    """The ids of the k highest of `values` ([V]), best first, the lowest id first among equals; all if k > V.

    `torch.topk` alone leaves the choice among equals open.
    """
    if k < values.numel():
        floor = values.topk(max(k, 1), sorted=False).values.min()
        ids = (values >= floor).nonzero().squeeze(1)
        return ids[values[ids].sort(descending=True, stable=True).indices[:k]]
    return values.sort(descending=True, stable=True).indices


def _weights(logits: Tensor, params: SamplingParams) -> Tensor:
    """[V] int64: floor(2**40 exp((logit - highest) / temperature)), 0 where min_p drops the token."""
    scaled = (logits - logits.max()).div_(max(params.temperature, _COLDEST))
    weights = scaled.exp_().mul_(_ONE).long()
    if params.min_p > 0:
        weights[weights < math.ceil(params.min_p * _ONE)] = 0
    return weights


def _kept(logits: Tensor, weights: Tensor, params: SamplingParams) -> Tensor | None:
    """The ids that top_k and top_p keep, best first; None when neither drops anything."""
    top_k = params.top_k if params.top_k < logits.numel() else 0
    if top_k == 0 and params.top_p >= 1:
        return None
    look = top_k or _FIRST_LOOK
    ids = best(logits, look)
    if params.top_p >= 1:
        return ids
    total = int(weights[ids].sum() if top_k else weights.sum())
    needed = min(max(1, math.ceil(params.top_p * total)), total)  # a float's product may round past total
    while int((cumulative := weights[ids].cumsum(0))[-1]) < needed:
        look *= 16
        ids = best(logits, look)
    return ids[: int(torch.searchsorted(cumulative, needed)) + 1]
