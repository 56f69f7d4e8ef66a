"""Changes to single logits that a request asks for: bias, minimum length, penalties. Greedy feels them too.

Only the logits of ids that a request names or has used are touched, so the cost follows the request's own
tokens and not the vocabulary. This file knows nothing of temperature, truncation or chance.
"""

import torch
from torch import Tensor

from legato.core.plan import SampleRow
from legato.core.request import SamplingParams


def is_adjusted(row: SampleRow) -> bool:
    """Whether `adjust` would do anything to this row."""
    return bool(row.params.logit_bias) or row.params.needs_history or _stop_is_banned(row)


def adjust(logits: Tensor, row: SampleRow) -> Tensor:
    """A copy of `logits` ([V] fp32) with the row's bias, stop ban and penalties applied, in this order.

    The order is vLLM's (bias and minimum length, then penalties). It matters only between bias and the
    repetition penalty: bias adds and the penalty scales, so a penalty acts on what the bias made of a logit.
    """
    logits = logits.clone()
    if row.params.logit_bias:
        ids, amounts = zip(*row.params.logit_bias, strict=True)
        logits.index_add_(
            0, _ids(ids, logits), torch.tensor(amounts, dtype=logits.dtype, device=logits.device)
        )
    if _stop_is_banned(row):
        logits[_ids(tuple(row.params.stop_token_ids), logits)] = -torch.inf
    if row.params.needs_history:
        _penalize(logits, row.params, _ids(row.prompt, logits), _ids(row.generated, logits))
    return logits


def _stop_is_banned(row: SampleRow) -> bool:
    return row.num_generated < row.params.min_tokens and bool(row.params.stop_token_ids)


def _penalize(logits: Tensor, params: SamplingParams, prompt: Tensor, generated: Tensor) -> None:
    """Apply the three penalties in place: repetition scales first, then the two others subtract."""
    seen = torch.cat((prompt, generated))
    values = logits[seen]
    penalty = params.repetition_penalty
    # An id seen twice is written twice, with the same number.
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = generated.bincount()
    used = counts.nonzero().squeeze(1)
    logits[used] -= params.frequency_penalty * counts[used] + params.presence_penalty


def _ids(ids: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=like.device)
