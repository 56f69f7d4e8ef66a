"""Changes to logits that a request asks for: allowed ids, bias, bans, penalties, a constraint. Greedy feels
them too.

But for constraints, only the logits of ids that a request names or has used are touched, so the cost follows
the request's own tokens and not the vocabulary. This file knows nothing of temperature, truncation or chance.
"""

from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from legato.core.step_plan import SampleRow

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_OF_BYTE = np.where(_BITS, np.float32(0), np.float32(-np.inf))
"""[256, 8]: what a byte of a mask adds to the logits of its tokens."""


def is_adjusted(row: SampleRow) -> bool:
    """Whether this row needs a copy of its logits, for `adjust` or `forbid_others`."""
    params = row.params
    asked = params.logit_bias or params.bad_words or params.needs_history or _stop_is_banned(row)
    return bool(asked) or params.allowed_token_ids is not None or row.matcher is not None


def adjust(logits: Tensor, row: SampleRow) -> Tensor:
    """A copy of `logits` ([V] fp32) with the row's allowed ids, bias, bans, penalties applied, in this order.

    The order is vLLM's (what is allowed, bias, bans, then penalties). It matters only between bias and the
    repetition penalty: bias adds and the penalty scales, so a penalty acts on what the bias made of a logit.
    """
    return adjust_rows(logits[None], (row,))[0]


def adjust_rows(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """A copy of `logits` ([R, V]) in which each row is what `adjust` gives for it, all rows together."""
    adjusted = logits.clone(memory_format=torch.contiguous_format)
    flat = adjusted.view(-1)  # Token t of row r is at place r V + t.
    vocab = logits.shape[1]
    for values, row in zip(adjusted, rows, strict=True):
        if row.params.allowed_token_ids is not None:
            allowed = torch.tensor(sorted(row.params.allowed_token_ids), device=values.device)
            kept = values[allowed]
            values.fill_(-torch.inf)[allowed] = kept
    if any(row.params.logit_bias for row in rows):
        places = _places([[token for token, _ in row.params.logit_bias] for row in rows], vocab)
        amounts = torch.tensor([amount for row in rows for _, amount in row.params.logit_bias])
        flat.index_add_(0, places.to(flat.device), amounts.to(flat))
    if any(banned := [_banned(row) for row in rows]):
        flat[_places(banned, vocab).to(flat.device)] = -torch.inf
    if any(row.params.penalizes for row in rows):
        _penalize(adjusted, rows)
    return adjusted


def forbid_others(logits: Tensor, mask: bytes) -> None:
    """Set the logits ([V]) of all tokens that are not in `mask` (see `Matcher.mask`) to -inf, in place.

    By adding 0 or -inf, eight tokens for each byte: its time does not depend on how the mask looks.
    """
    vocab = len(logits)
    data = np.frombuffer(mask, dtype=np.uint8)[: -(-vocab // 8)]
    added = _OF_BYTE.take(data, axis=0, mode="clip").reshape(-1)[:vocab]  # "clip" spares a check of each byte
    logits[len(added) :] = -torch.inf
    logits[: len(added)] += torch.from_numpy(added).to(logits.device)


def _stop_is_banned(row: SampleRow) -> bool:
    """A constraint's mask has the ban in it, but where that leaves nothing (see `SampleRow.allowed`)."""
    early = row.num_generated < row.params.min_tokens
    return early and row.matcher is None and bool(row.params.stop_token_ids)


def _banned(row: SampleRow) -> list[int]:
    """Stop tokens while the reply is too short, and the ends of bad words that it is about to complete."""
    words = row.params.bad_words
    ends = [word[-1] for word in words if row.generated[len(row.generated) - len(word) + 1 :] == word[:-1]]
    return [*ends, *row.params.stop_token_ids] if _stop_is_banned(row) else ends


def _penalize(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Apply the three penalties in place: repetition scales first, then the two others subtract."""
    device, vocab = logits.device, logits.shape[1]
    flat = logits.view(-1)
    repetition, frequency, presence = (
        torch.tensor([getattr(row.params, f"{name}_penalty") for row in rows], device=device)
        for name in ("repetition", "frequency", "presence")
    )
    seen = _places([row.prompt + row.generated for row in rows], vocab).to(device)
    penalty, values = repetition[seen // vocab], flat[seen]
    # An id seen twice is written twice, with the same number.
    flat[seen] = torch.where(values > 0, values / penalty, values * penalty)
    generated = _places([row.generated for row in rows], vocab).to(device)
    used, counts = torch.unique(generated, return_counts=True)
    owner = used // vocab
    flat[used] -= frequency[owner] * counts + presence[owner]


def _places(tokens: Sequence[Collection[int]], vocab: int) -> Tensor:
    """Where the tokens of each row are in [R, V] logits that are laid out as one vector, row after row."""
    ids = torch.from_numpy(np.fromiter(chain.from_iterable(tokens), dtype=np.int64))
    starts = torch.arange(len(tokens)) * vocab
    return ids + starts.repeat_interleave(torch.tensor([len(row) for row in tokens]))
