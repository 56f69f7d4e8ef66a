"""From what a client sends to a request, and from token events to what it reads: text, cut at stop strings.

A `Reply` belongs to one request and knows nothing of threads, queues or HTTP. Tokens are reported as soon
as they are sampled; text follows once it is certain, which may be later: half a character and anything
that may still become a stop string is held back.
"""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from legato.core.events import Event, FinishEvent, TokenEvent
from legato.core.plan import Sampled
from legato.core.request import Request, RequestId, SamplingParams
from legato.core.stopping import FinishReason
from legato.text.detokenizer import Detokenizer
from legato.text.stop import StopStrings
from legato.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Finish:
    """How a reply ended."""

    reason: FinishReason
    stop: str | int | None = None
    """The stop string, or the id of the client's own stop token, that ended it; None for every other end."""
    message: str = ""
    """What failed, for `FinishReason.ERROR` and `FinishReason.CONSTRAINT`."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to a reply."""

    text: str
    """Certain text; joined over all deltas it is the reply's text."""
    sampled: Sampled | None
    """The token, if there is one. A stop token is a token too, but adds no text."""
    finish: Finish | None
    """Set on the last delta, and only there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a request is treated among others; nothing that changes its tokens."""

    priority: int = 0
    """The lower, the more urgent."""
    cache_salt: str = ""
    """It shares computed blocks only with requests of the same salt."""
    timeout: float | None = None
    """Seconds from its arrival after which it ends, in whatever state it is."""


NO_TERMS = Terms()


def new_request(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    arrival: float,
    request_id: str | None = None,
    terms: Terms = NO_TERMS,
) -> Request:
    """A request that lacks nothing: with an id of its own and a seed, if it was given none."""
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(63))
    return Request(
        id=RequestId(request_id or f"req-{secrets.token_hex(12)}"),
        prompt=tuple(prompt),
        params=params,
        arrival=arrival,
        priority=terms.priority,
        cache_salt=terms.cache_salt,
        deadline=None if terms.timeout is None else arrival + terms.timeout,
    )


class Reply:
    """Builds the text of one request from its events."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, stops: Sequence[str], shown: Collection[int] = ()
    ) -> None:
        """`shown` are special tokens that are part of the text."""
        self.request = request
        self._detokenizer = Detokenizer(tokenizer, shown=shown)
        self._stops = StopStrings(stops)
        self._eos_ids = tokenizer.eos_ids
        self.num_cached = 0
        """Tokens of the prompt that were found in the cache; known with the first token."""
        self.finished = False
        """Whether the last delta was made."""
        self.must_abort = False
        """Whether a stop string ended the text while the engine goes on: tell it, with FinishReason.STOP."""

    def push(self, event: Event) -> Delta:
        """Take the next event. Not after the reply is finished."""
        if isinstance(event, FinishEvent):
            delta = Delta(self._flush(), None, Finish(event.reason, message=event.message))
        else:
            delta = self._token(event)
            self.must_abort = delta.finish is not None and event.finish is None
        self.finished = delta.finish is not None
        return delta

    def _token(self, event: TokenEvent) -> Delta:
        token = event.sampled.token
        self.num_cached = event.num_cached
        stopped = event.finish is FinishReason.STOP
        text = "" if stopped else self._stops.push(self._detokenizer.push(token))
        if event.finish is not None and self._stops.matched is None:
            text += self._flush()
        if self._stops.matched is not None:
            return Delta(text, event.sampled, Finish(FinishReason.STOP, self._stops.matched))
        if event.finish is not None:
            own = stopped and token not in self._eos_ids
            return Delta(text, event.sampled, Finish(event.finish, token if own else None))
        return Delta(text, event.sampled, None)

    def _flush(self) -> str:
        """The text still held back: it became no stop string, unless its very end does."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
