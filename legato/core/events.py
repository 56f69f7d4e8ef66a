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


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """A request ended without a token: it was aborted, or it failed. No other event follows."""

    request_id: RequestId
    reason: FinishReason
    message: str = ""
    """What failed, for `FinishReason.ERROR` and `FinishReason.CONSTRAINT`."""


Event = TokenEvent | FinishEvent
