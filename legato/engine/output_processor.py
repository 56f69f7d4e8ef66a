"""Turns token events into text, and cuts the text at stop strings.

An `OutputProcessor` belongs to one request and knows nothing of threads, queues or HTTP. Tokens are reported
as soon as they are sampled. Their text follows when it is certain, which may be later: an incomplete UTF-8
character is held back, and so is a text that may become a stop string.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from legato.core.events import Event, FinishEvent, ProgressEvent, PromptEvent, TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import Request
from legato.core.step_plan import TokenLogprobs
from legato.text.detokenizer import Detokenizer
from legato.text.stop import StopStrings
from legato.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Finish:
    """How a reply ended."""

    reason: FinishReason
    stop: str | int | None = None
    """The stop string, or the id of the client's stop token, that ended the reply. None for any other end."""
    message: str = ""
    """The failure, for `FinishReason.ERROR` and `FinishReason.CONSTRAINT`."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The addition of one event to a reply."""

    text: str
    """Text that is certain. The texts of all deltas, joined, are the text of the reply."""
    sampled: TokenLogprobs | None
    """The token, if there is one. A stop token is a token too, but adds no text."""
    finish: Finish | None
    """Set on the last delta only."""
    prompt: tuple[TokenLogprobs, ...] = ()
    """The next prompt tokens with their log-probabilities, if asked for. The first one has none."""
    progress: ProgressEvent | None = None
    """The progress of the prompt, if asked for. Such a delta adds nothing to the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeOptions:
    """How the text of a reply is made from its tokens."""

    stop: Sequence[str] = ()
    """Strings that end the reply. They are cut off."""
    min_tokens: int | None = None
    """The first this many tokens cannot complete a stop string. None: the request's `min_tokens`."""
    include_stop: bool = False
    """Keep the stop string or stop token that ends the reply in its text."""
    skip_special: bool = True
    """Leave special tokens out of the text."""
    shown: frozenset[int] = frozenset()
    """Special tokens that are part of the text in any case."""


PLAIN_TEXT = DetokenizeOptions()


class OutputProcessor:
    """Builds the text of one reply from the events of its request."""

    def __init__(self, request: Request, tokenizer: Tokenizer, text: DetokenizeOptions = PLAIN_TEXT) -> None:
        self.request = request
        self._include_stop = text.include_stop
        self._detokenizer = Detokenizer(tokenizer, skip_special=text.skip_special, shown=text.shown)
        self._stops = StopStrings(text.stop, include=text.include_stop)
        self._min_tokens = request.params.min_tokens if text.min_tokens is None else text.min_tokens
        self._num_generated = 0
        scores_prompt = request.params.prompt_logprobs is not None
        self._first_prompt_token = (TokenLogprobs(request.prompt[0]),) if scores_prompt else ()
        """The first prompt token, which has no log-probability, until it was reported. Empty if not asked
        for."""
        self._eos_ids = tokenizer.eos_ids
        self.num_cached = 0
        """Prompt tokens that were found in the prefix cache. Known with the first token."""
        self.is_finished = False
        """Whether the last delta was made."""
        self.must_abort = False
        """Whether a stop string ended the text. Then the engine must abort the request with
        FinishReason.STOP."""

    def push(self, event: Event) -> Delta:
        """The delta for the next event. Must not be called after the reply is finished."""
        if isinstance(event, ProgressEvent):
            return Delta("", None, None, progress=event)
        prompt, self._first_prompt_token = self._first_prompt_token, ()
        if isinstance(event, PromptEvent):
            return Delta("", None, None, prompt + event.scored)
        if isinstance(event, FinishEvent):
            delta = Delta(self._flush(), None, Finish(event.reason, message=event.message), prompt)
        else:
            delta = self._token(event, prompt)
            self.must_abort = delta.finish is not None and event.finish is None
        self.is_finished = delta.finish is not None
        return delta

    def _token(self, event: TokenEvent, prompt: tuple[TokenLogprobs, ...]) -> Delta:
        token = event.sampled.token
        self.num_cached = event.num_cached
        self._num_generated += 1
        is_stop_token = event.finish is FinishReason.STOP
        is_hidden = is_stop_token and not self._include_stop
        text = "" if is_hidden else self._add(self._detokenizer.push(token))
        if event.finish is not None and self._stops.matched is None:
            text += self._flush()
        if self._stops.matched is not None:
            return Delta(text, event.sampled, Finish(FinishReason.STOP, self._stops.matched), prompt)
        if event.finish is not None:
            is_clients = is_stop_token and token not in self._eos_ids
            return Delta(text, event.sampled, Finish(event.finish, token if is_clients else None), prompt)
        return Delta(text, event.sampled, None, prompt)

    def _add(self, text: str) -> str:
        return self._stops.push(text, may_stop=self._num_generated > self._min_tokens)

    def _flush(self) -> str:
        """The text that is still held back. It becomes no stop string unless its end completes one."""
        return self._add(self._detokenizer.flush()) + self._stops.flush()
