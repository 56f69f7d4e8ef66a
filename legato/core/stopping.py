"""When a reply ends by its own rule. (Stop strings are found in the text, outside the core.)"""

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.core.sequence import Sequence


class FinishReason(Enum):
    """Why a request got its last event."""

    STOP = "stop"
    """A stop token, or a stop string found in its text."""
    LENGTH = "length"
    """`max_tokens` tokens."""
    ABORT = "abort"
    """The client left."""
    TIMEOUT = "timeout"
    """Its deadline passed."""
    ERROR = "error"
    """The step it was in failed."""
    CONSTRAINT = "constraint"
    """Its constraint cannot be followed any further."""


def finish_reason(sequence: "Sequence") -> FinishReason | None:
    """Whether the token just appended ends the reply; a stop token wins over the length.

    A constraint may have left nothing but a stop token before `min_tokens`.
    """
    params, num_generated = sequence.request.params, len(sequence.tokens) - len(sequence.request.prompt)
    may_stop = num_generated > params.min_tokens or params.constraint is not None
    if may_stop and sequence.tokens[-1] in params.stop_token_ids:
        return FinishReason.STOP
    if num_generated >= params.max_tokens:
        return FinishReason.LENGTH
    return None
