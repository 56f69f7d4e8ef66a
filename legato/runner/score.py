"""How likely the tokens of prompts were: the LM head for the rows that were asked about, a slice at a time.

A prompt's logits as a whole would take far more memory than its K and V, so only `SLICE` of them exist at
once. On the CPU's exact layers rows of the head stand alone, as does all that is done to them here: a token's
log-probabilities are the same bits however its prompt was cut into chunks, and the chunks into slices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from legato.core.request import RequestId
from legato.core.step_plan import StepPlan, TokenLogprobs
from legato.models.decoder import Decoder
from legato.runner.draw import take_rows
from legato.runner.sampler import report, tiles

SLICE = 1 << 24
"""Logits that exist at once: 64 MB."""


def score(decoder: Decoder, hidden: Tensor, plan: StepPlan) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
    """The targets of each of `plan.score` with their log-probabilities and ranks.

    `hidden` is [T, E], as the decoder made it: a row for each token of the step.
    """
    starts = [0, *accumulate(len(seq.tokens) for seq in plan.batch.seqs)]
    height = max(1, SLICE // decoder.spec.vocab_size)
    scored: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
    for rows in plan.score:
        first, end = (starts[rows.seq] + rows.first + offset for offset in (0, len(rows.targets)))
        entries: list[TokenLogprobs] = []
        for low in range(first, end, height):
            logits = decoder.logits(hidden[low : min(low + height, end)])
            entries += _entries(logits, rows.targets[low - first :], rows.num_top)
        scored[rows.request_id] = tuple(entries)
    return scored


def _entries(logits: Tensor, targets: Sequence[int], num_top: int) -> Iterator[TokenLogprobs]:
    """An entry for each row of `logits` ([R, V]); `targets[i]` is the token of row i."""
    for picks in tiles(range(len(logits)), logits):
        part, chosen = take_rows(logits, picks), [targets[i] for i in picks]
        own = part.gather(1, torch.tensor(chosen, device=part.device)[:, None])
        ranks: list[int] = (1 + (part > own).sum(dim=-1)).tolist()
        for entry, rank in zip(report(part, [(token, num_top) for token in chosen]), ranks, strict=True):
            yield replace(entry, rank=rank)
