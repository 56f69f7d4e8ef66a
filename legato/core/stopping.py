"""When a reply ends with a stop token or its maximum length. Stop strings are found in the text, by the
engine."""

from legato.core.lifecycle import FinishReason
from legato.core.sequence import Sequence


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Whether the token that was just appended ends the reply. A stop token takes precedence over the length.

    Before `min_tokens`, a stop token ends the reply only if there is a constraint, which may have allowed no
    other token.
    """
    params, num_generated = sequence.request.params, len(sequence.tokens) - len(sequence.request.prompt)
    may_stop = num_generated > params.min_tokens or params.constraint is not None
    if may_stop and sequence.tokens[-1] in params.stop_token_ids:
        return FinishReason.STOP
    if num_generated >= params.max_tokens:
        return FinishReason.LENGTH
    return None
