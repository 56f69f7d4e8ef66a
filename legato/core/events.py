"""What a client may see of a step."""

from dataclasses import dataclass
from typing import NamedTuple

from legato.core.plan import Sampled
from legato.core.request import RequestId
from legato.core.stopping import FinishReason


class TokenEvent(NamedTuple):
    """A token was generated."""

    request_id: RequestId
    sampled: Sampled
    finish: FinishReason | None
    """Set on the last token of a reply that ended by its own rule; no other event follows."""
    num_cached: int = 0
    """Prompt tokens that were found in the cache and not computed; the same in all events of a request."""


class PromptEvent(NamedTuple):
    """The next tokens of a prompt, from its second one on, have their log-probabilities."""

    request_id: RequestId
    scored: tuple[Sampled, ...]


class ProgressEvent(NamedTuple):
    """How far a prompt is that has no token yet; for who asked."""

    request_id: RequestId
    num_computed: int
    num_prompt: int
    num_cached: int
    queue_place: int | None
    """How many are before it in the queue; None while it runs."""
    predicted_ttft: float | None
    """Seconds from its arrival to its first token, if prompts go on being read as fast as in the last steps;
    None if no step worked on a prompt yet."""


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """A request ended without a token: aborted, failed, or it asked for none. No other event follows."""

    request_id: RequestId
    reason: FinishReason
    message: str = ""
    """What failed, for `FinishReason.ERROR` and `FinishReason.CONSTRAINT`."""


Event = TokenEvent | PromptEvent | ProgressEvent | FinishEvent
