"""From what a client sends to a request, and from token events to what it reads: text, cut at stop strings.

A `Reply` belongs to one request and knows nothing of threads, queues or HTTP. Tokens are reported as soon
as they are sampled; text follows once it is certain, which may be later: half a character and anything
that may still become a stop string is held back.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from legato.core.events import Event, FinishEvent, ProgressEvent, PromptEvent, TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.core.step_plan import TokenLogprobs
from legato.sampling_params import SamplingParams
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
    sampled: TokenLogprobs | None
    """The token, if there is one. A stop token is a token too, but adds no text."""
    finish: Finish | None
    """Set on the last delta, and only there."""
    prompt: tuple[TokenLogprobs, ...] = ()
    """The prompt's next tokens with their log-probabilities, if asked for; the first one has none."""
    progress: ProgressEvent | None = None
    """How far the prompt is, if that was asked for. Such a delta adds nothing to the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How a reply's text is made of its tokens."""

    stop: Sequence[str] = ()
    """Strings that end the reply; they are cut off."""
    min_tokens: int | None = None
    """Number of first tokens that cannot complete a stop string; None: the request's `min_tokens`."""
    include_stop: bool = False
    """What ends the reply, string or token, stays in its text."""
    skip_special: bool = True
    """Tokens that steer the model add no text."""
    shown: frozenset[int] = frozenset()
    """Those that do all the same."""


PLAIN_TEXT = TextRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a request is treated among others; nothing that changes its tokens."""

    priority: int = 0
    """The lower, the more urgent."""
    cache_salt: str = ""
    """It shares computed blocks only with requests of the same salt."""
    tpot_target: float | None = None
    """Seconds between two tokens of its reply that are not to be exceeded; the server's target if None."""
    ttft_target: float | None = None
    """Seconds from its arrival by which its first token is wanted; the server's target if None."""
    wants_progress: bool = False
    """It is told how far its prompt is."""
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
        tpot_target=terms.tpot_target,
        ttft_target=terms.ttft_target,
        wants_progress=terms.wants_progress,
        deadline=None if terms.timeout is None else arrival + terms.timeout,
    )


class Reply:
    """Builds the text of one request from its events."""

    def __init__(self, request: Request, tokenizer: Tokenizer, text: TextRules = PLAIN_TEXT) -> None:
        self.request = request
        self._include_stop = text.include_stop
        self._detokenizer = Detokenizer(tokenizer, skip_special=text.skip_special, shown=text.shown)
        self._stops = StopStrings(text.stop, include=text.include_stop)
        self._min_tokens = request.params.min_tokens if text.min_tokens is None else text.min_tokens
        self._num_generated = 0
        scores_prompt = request.params.prompt_logprobs is not None
        self._unscored = (TokenLogprobs(request.prompt[0]),) if scores_prompt else ()
        """The first token of a prompt of which log-probabilities were asked for, until it was told."""
        self._eos_ids = tokenizer.eos_ids
        self.num_cached = 0
        """Tokens of the prompt that were found in the cache; known with the first token."""
        self.finished = False
        """Whether the last delta was made."""
        self.must_abort = False
        """Whether a stop string ended the text while the engine goes on: tell it, with FinishReason.STOP."""

    def push(self, event: Event) -> Delta:
        """Take the next event. Not after the reply is finished."""
        if isinstance(event, ProgressEvent):
            return Delta("", None, None, progress=event)
        prompt, self._unscored = self._unscored, ()
        if isinstance(event, PromptEvent):
            return Delta("", None, None, prompt + event.scored)
        if isinstance(event, FinishEvent):
            delta = Delta(self._flush(), None, Finish(event.reason, message=event.message), prompt)
        else:
            delta = self._token(event, prompt)
            self.must_abort = delta.finish is not None and event.finish is None
        self.finished = delta.finish is not None
        return delta

    def _token(self, event: TokenEvent, prompt: tuple[TokenLogprobs, ...]) -> Delta:
        token = event.sampled.token
        self.num_cached = event.num_cached
        self._num_generated += 1
        stopped = event.finish is FinishReason.STOP
        hidden = stopped and not self._include_stop
        text = "" if hidden else self._add(self._detokenizer.push(token))
        if event.finish is not None and self._stops.matched is None:
            text += self._flush()
        if self._stops.matched is not None:
            return Delta(text, event.sampled, Finish(FinishReason.STOP, self._stops.matched), prompt)
        if event.finish is not None:
            own = stopped and token not in self._eos_ids
            return Delta(text, event.sampled, Finish(event.finish, token if own else None), prompt)
        return Delta(text, event.sampled, None, prompt)

    def _add(self, text: str) -> str:
        return self._stops.push(text, may_stop=self._num_generated > self._min_tokens)

    def _flush(self) -> str:
        """The text still held back: it became no stop string, unless its very end does."""
        return self._add(self._detokenizer.flush()) + self._stops.flush()
