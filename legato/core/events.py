"""The events of a step that a client may see."""

from dataclasses import dataclass
from typing import NamedTuple

from legato.core.lifecycle import FinishReason
from legato.core.request import RequestId
from legato.core.step_plan import TokenLogprobs


class TokenEvent(NamedTuple):
    """A token was generated."""

    request_id: RequestId
    sampled: TokenLogprobs
    finish: FinishReason | None
    """Set on the last token of a reply that ended with a stop token or its maximum length. No event
    follows."""
    num_cached: int = 0
    """The number of prompt tokens that were found in the prefix cache. The same in all events of a
    request."""


class PromptEvent(NamedTuple):
    """The log-probabilities of the next prompt tokens. They begin with the second token of the prompt."""

    request_id: RequestId
    scored: tuple[TokenLogprobs, ...]


class ProgressEvent(NamedTuple):
    """How far the prompt of a request without a first token is. Sent only to requests that asked for it."""

    request_id: RequestId
    num_computed: int
    num_prompt: int
    num_cached: int
    queue_position: int | None
    """The number of requests ahead in the queue. None while the request runs."""
    predicted_ttft: float | None
    """Seconds from arrival to the first token, at the prefill rate of the last steps.

    None if no step has worked on a prompt yet."""


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """A request ended without a token: it was aborted, it failed, or it asked for none. No event follows."""

    request_id: RequestId
    reason: FinishReason
    message: str = ""
    """The failure, for `FinishReason.ERROR` and `FinishReason.CONSTRAINT`."""


Event = TokenEvent | PromptEvent | ProgressEvent | FinishEvent
