"""From logits to tokens: each row by its own request's parameters, and nothing else.

The order of steps is vLLM's, and each has its reason:

    1. log-probabilities    of the model's own distribution, so they are the same whatever the client bends
    2. bias, stop ban, penalties (`adjust`)     can change which token is best: greedy needs them as well
    3. greedy: the highest logit, the lowest id among equals
    4. else temperature, min_p, top_k, top_p, draw (`draw`)     never change which token is best

Same logits row, same parameters, same index give the same token, bit for bit, alone or in any batch. This
file does not know where logits come from, and it keeps no state between calls.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from legato.core.plan import Sampled, SampleRow
from legato.errors import StepError
from legato.runner.adjust import adjust, is_adjusted
from legato.runner.draw import best, draw
from legato.runner.random import random64


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Sampled, ...]:
    """One token per row of `logits` ([R, V] fp32, left as it is); every `params.seed` is set.

    Rows that are greedy and ask for nothing else cost one argmax for all of them together. Ids in parameters
    and histories are below V: that is checked where requests enter.

    Raises StepError, naming the request, when a row holds NaN or +inf or no token is left to choose.
    """
    highest = logits.argmax(dim=-1, keepdim=True)
    peaks = logits.gather(1, highest).squeeze(1).tolist()
    tokens = highest.squeeze(1).tolist()
    return tuple(
        _sample_row(logits[i], row, token, peak)
        for i, (row, token, peak) in enumerate(zip(rows, tokens, peaks, strict=True))
    )


def _sample_row(logits: Tensor, row: SampleRow, token: int, peak: float) -> Sampled:
    """Sample one row of [V] logits whose argmax is `token`, with the value `peak`."""
    _check_peak(row, peak)
    raw = logits
    if is_adjusted(row):
        logits = adjust(raw, row)
        token = int(logits.argmax())
        _check_peak(row, float(logits[token]))
    if not row.params.greedy:
        assert row.params.seed is not None
        token = draw(logits, row.params, random64(row.params.seed, row.num_generated))
    if row.params.logprobs is None:
        return Sampled(token)
    logprobs = raw.log_softmax(dim=-1)
    top = best(raw, row.params.logprobs)
    return Sampled(
        token, float(logprobs[token]), tuple(zip(top.tolist(), logprobs[top].tolist(), strict=True))
    )


def _check_peak(row: SampleRow, peak: float) -> None:
    """argmax ranks NaN above everything, so one look at the highest logit covers NaN, +inf and all -inf."""
    if not math.isfinite(peak):
        raise StepError(f"request {row.request_id}: no token can be chosen, the highest logit is {peak}")
