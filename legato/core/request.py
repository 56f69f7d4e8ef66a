"""What a client asked for: frozen, complete, in plain numbers.

Text never comes here: a prompt is token ids, and stop *strings* are matched by whoever turns tokens into
text (see `legato.engine.output`).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol

from legato.errors import RequestError

RequestId = NewType("RequestId", str)


class Matcher(Protocol):
    """Follows one reply along its constraint."""

    def mask(self, generated: Sequence[int]) -> bytes:
        """Which tokens may come after `generated`: token t if bit t % 8 of byte t // 8 is set.

        A function of `generated` alone, so that no preemption and no replay changes it; quick if each call's
        tokens continue those of the call before. Tokens past the end may not come; at least one may. Raises
        `ConstraintError` if none may, or if it would take too long to tell.
        """
        ...


class Constraint(Protocol):
    """A form that a reply must have (a grammar, say). Frozen: all replies of a request share it."""

    def matcher(self) -> Matcher:
        """For one new reply."""
        ...


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k"), (int,)),
    **dict.fromkeys(("seed", "logprobs", "prompt_logprobs"), (int, type(None))),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (int, float)),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), (int, float)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when the reply ends.

    A value out of range raises `RequestError` that names it; whether ids are in the vocabulary is checked
    where requests enter (`Scheduler.validate`).
    """

    max_tokens: int
    """At most this many generated tokens, >= 1. With `prompt_logprobs` 0 is possible: no reply at all."""
    min_tokens: int = 0
    """No stop token is sampled before this many were generated."""
    temperature: float = 1.0
    """0 means greedy: the highest logit, the lowest id among equals."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or reply (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the reply."""
    frequency_penalty: float = 0.0
    """Subtracted from a logit once for each time its token is in the reply."""
    seed: int | None = None
    """Makes the draws repeatable; None draws a fresh seed where the request enters the engine."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and the amount added to its logit."""
    logprobs: int | None = None
    """None for none; k for the chosen token's log-probability and the k most likely ones."""
    prompt_logprobs: int | None = None
    """None for none; k for each prompt token's log-probability and the k most likely ones in its place."""
    allowed_token_ids: frozenset[int] | None = None
    """The only ids that may be sampled; None for all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of ids, none empty, whose last one is not sampled where the reply ends with the others."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the reply: the model's end-of-sequence ids (unless ignored) and the client's own."""
    constraint: Constraint | None = None
    """The form of the reply; it must let the reply end by a stop token. It wins over `min_tokens`: a reply
    that can only end, ends. Not with other rules for which ids may come."""

    def __post_init__(self) -> None:
        self._check_types()
        names = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p")
        for name in (*names, "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise RequestError(f"{name} must be at least 0, not {value}", param=name)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens must be at least 1, not 0", param="max_tokens")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids allows no token", param="allowed_token_ids")
        if self.constraint is not None and (self.allowed_token_ids is not None or self.bad_words):
            name = "bad_words" if self.bad_words else "allowed_token_ids"
            raise RequestError(f"{name}: not together with a form that the reply must have", param=name)
        if not all(self.bad_words):
            raise RequestError("bad_words holds one without a token", param="bad_words")
        for name in ("top_p", "min_p"):
            if getattr(self, name) > 1:
                raise RequestError(f"{name} must be at most 1, not {getattr(self, name)}", param=name)
        if not 0 < self.repetition_penalty < math.inf:
            message = f"repetition_penalty must be above 0, not {self.repetition_penalty}"
            raise RequestError(message, param="repetition_penalty")
        amounts = [amount for _, amount in self.logit_bias]
        if not all(map(math.isfinite, (self.presence_penalty, self.frequency_penalty, *amounts))):
            raise RequestError("penalties and logit_bias must be finite numbers", param="logit_bias")

    def _check_types(self) -> None:
        """Half a token, or a text for a seed, would show only in a step, and end everyone in it."""
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds):
                expected = "a number" if float in kinds else "an integer"
                raise RequestError(f"{name} must be {expected}, not {value!r}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def named_ids(self) -> dict[str, Collection[int]]:
        """All token ids in these parameters, by the parameter."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": [token for token, _ in self.logit_bias],
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": [token for word in self.bad_words for token in word],
        }

    @property
    def needs_history(self) -> bool:
        """Whether sampling looks at the tokens so far."""
        return self.penalizes or bool(self.bad_words)

    @property
    def penalizes(self) -> bool:
        """Whether tokens so far change the logits of their like."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and one reply to be computed for it."""

    id: RequestId
    prompt: tuple[int, ...] = field(repr=False)
    """Token ids, at least one. Left out of `repr`: prompts do not belong in logs."""
    params: SamplingParams
    arrival: float
    """Seconds on the engine's clock."""
    cache_salt: str = field(default="", repr=False)
    """Requests share computed blocks only with those of the same salt."""
    priority: int = 0
    """The lower, the more urgent."""
    tpot_target: float | None = None
    """Seconds between two tokens of its reply that are not to be exceeded; the server's target if None."""
    ttft_target: float | None = None
    """Seconds from its arrival by which its first token is wanted; the server's target if None."""
    wants_progress: bool = False
    """It is told how far its prompt is."""
    deadline: float | None = None
    """When it ends, in whatever state it is; seconds on the engine's clock."""

    @property
    def max_computed(self) -> int:
        """The most positions whose keys and values this request can ever need.

        The last generated token is returned and never computed.
        """
        return len(self.prompt) + max(self.params.max_tokens - 1, 0)
