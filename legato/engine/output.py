"""From token events to what a client reads: text, token by token, cut at stop strings.

A `Reply` belongs to one request and knows nothing of threads, queues or HTTP. Tokens are reported as soon
as they are sampled; text follows once it is certain, which may be later: half a character and anything
that may still become a stop string is held back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from legato.core.events import Event, FinishEvent, TokenEvent
from legato.core.plan import Sampled
from legato.core.request import Request
from legato.core.stopping import FinishReason
from legato.text.detokenizer import Detokenizer
from legato.text.stop import StopStrings
from legato.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Finish:
    """How a reply ended."""

    reason: FinishReason
    stop: str | int | None = None
    """The stop string or the stop token's id that ended it; None for every other end."""
    message: str = ""
    """What failed, for `FinishReason.ERROR`."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to a reply."""

    text: str
    """Certain text; joined over all deltas it is the reply's text."""
    sampled: Sampled | None
    """The token, if there is one. A stop token is a token too, but adds no text."""
    finish: Finish | None
    """Set on the last delta, and only there."""


class Reply:
    """Builds the text of one request from its events."""

    def __init__(self, request: Request, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.request = request
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self.finished = False

    def push(self, event: Event) -> Delta:
        """Take the next event. If the delta's finish is set but the event's is not, a stop string was found
        and the request has to be aborted with `FinishReason.STOP`."""
        delta = self._token(event) if isinstance(event, TokenEvent) else self._end(event)
        self.finished = delta.finish is not None
        return delta

    def _token(self, event: TokenEvent) -> Delta:
        token = event.sampled.token
        stopped = event.finish is FinishReason.STOP
        text = "" if stopped else self._stops.push(self._detokenizer.push(token))
        if event.finish is not None and self._stops.matched is None:
            text += self._flush()
        if self._stops.matched is not None:
            return Delta(text, event.sampled, Finish(FinishReason.STOP, self._stops.matched))
        if event.finish is not None:
            return Delta(text, event.sampled, Finish(event.finish, token if stopped else None))
        return Delta(text, event.sampled, None)

    def _end(self, event: FinishEvent) -> Delta:
        return Delta(self._flush(), None, Finish(event.reason, message=event.message))

    def _flush(self) -> str:
        """The text still held back: it became no stop string, unless its very end does."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
