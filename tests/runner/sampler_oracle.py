"""A slow, obvious sampler in numpy: the definitions of `SamplingParams` spelled out in fp64, id by id."""

import math
from collections import Counter

import numpy as np
import numpy.typing as npt

from legato.core.request import RequestId
from legato.core.step_plan import SampleRow
from legato.sampling_params import SamplingParams

Row = npt.NDArray[np.float64]


def make_row(
    params: SamplingParams, *, generated: tuple[int, ...] = (), prompt: tuple[int, ...] = ()
) -> SampleRow:
    return SampleRow(0, RequestId("r"), params, len(generated), prompt, generated)


def adjusted(logits: Row, row: SampleRow) -> Row:
    """What is allowed, bias, bans, then repetition, frequency and presence penalty."""
    params, out = row.params, logits.copy()
    counts = Counter(row.generated)
    if params.allowed_token_ids is not None:
        out[[token for token in range(len(out)) if token not in params.allowed_token_ids]] = -math.inf
    for token, amount in params.logit_bias:
        out[token] += amount
    for token in params.stop_token_ids if row.num_generated < params.min_tokens else ():
        out[token] = -math.inf
    for *start, end in params.bad_words:
        if [*row.generated][len(row.generated) - len(start) :] == start:
            out[end] = -math.inf
    for token in {*row.prompt, *row.generated}:
        out[token] *= params.repetition_penalty if out[token] <= 0 else 1 / params.repetition_penalty
        out[token] -= params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
    return out


def ranked(values: Row) -> list[int]:
    """Ids, the highest value first, the lowest id first among equals."""
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def distribution(logits: Row, params: SamplingParams) -> Row:
    """[V] probabilities after temperature, min_p, top_k and top_p of adjusted logits."""
    p = np.exp((logits - logits.max()) / params.temperature)
    p[p < params.min_p] = 0  # The most likely token has 1 here.
    order = ranked(logits)
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    mass, kept = 0.0, 0
    while kept == 0 or (mass < params.top_p and kept < len(p)):
        mass += p[order[kept]]
        kept += 1
    p[order[kept:]] = 0
    return p / p.sum()


def inverse_cdf(p: Row, order: list[int], u: float) -> tuple[int, float]:
    """The id whose share of [0, 1), laid out in `order`, holds u; and u's distance to the share's ends."""
    ends = p[order].cumsum()
    place = min(int(np.searchsorted(ends, u, side="right")), len(p) - 1)
    near = np.abs(np.concatenate(([0.0], ends)) - u)
    return order[place], float(near.min())
