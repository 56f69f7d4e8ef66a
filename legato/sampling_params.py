"""How the tokens of a reply are chosen, and when the reply ends.

Text does not appear here. `legato.engine.output_processor` matches stop *strings* where tokens become text.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from legato.errors import RequestError


class Matcher(Protocol):
    """Follows one reply along its constraint."""

    def mask(self, generated: Sequence[int]) -> bytes:
        """The tokens that may follow `generated`, as a bit mask: token t if bit t % 8 of byte t // 8 is set.

        Tokens past the end of the mask are not allowed. The mask is a function of `generated` alone, so that
        a preemption or a replay does not change it. The call is fast if `generated` continues that of the
        previous call. Raises `ConstraintError` if no token is allowed, or if the answer would take too long.
        """
        ...


class Constraint(Protocol):
    """A set of replies that are allowed, such as a grammar. Immutable, and shared by all replies of a
    request."""

    def matcher(self) -> Matcher:
        """A matcher for one new reply."""
        ...


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k"), (int,)),
    **dict.fromkeys(("seed", "logprobs", "prompt_logprobs"), (int, type(None))),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (int, float)),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), (int, float)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when the reply ends.

    Raises `RequestError`, which names the parameter, for a value of the wrong type or out of range. Whether
    token ids are in the vocabulary is checked by `Scheduler.validate`.
    """

    max_tokens: int
    """The most tokens to generate, >= 1. With `prompt_logprobs`, 0 is allowed: there is no reply at all."""
    min_tokens: int = 0
    """No stop token is sampled before this many tokens were generated."""
    temperature: float = 1.0
    """0 means greedy: the token with the highest logit, and the lowest id among equals."""
    top_k: int = 0
    """Keep the k most likely tokens. 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this value."""
    min_p: float = 0.0
    """Drop tokens that are less likely than this share of the most likely token."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or reply (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the reply."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time it occurs in the reply."""
    seed: int | None = None
    """Makes the reply repeatable. With None, the engine chooses a random seed for the request."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the amount that is added to its logit."""
    logprobs: int | None = None
    """k: return the log-probability of each sampled token and of the k most likely tokens. None: return
    none."""
    prompt_logprobs: int | None = None
    """k: return the log-probability of each prompt token and of the k most likely tokens in its place."""
    allowed_token_ids: frozenset[int] | None = None
    """The only ids that may be sampled. None allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of ids, none empty. The last id of a run is not sampled directly after the others."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the reply: the model's end-of-sequence ids (unless ignored) and those of the client."""
    constraint: Constraint | None = None
    """A grammar or the like that the reply must follow. It must allow the reply to end with a stop token.

    It takes precedence over `min_tokens`: a reply that can only end, ends. It cannot be combined with
    `allowed_token_ids` or `bad_words`."""

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
            raise RequestError(f"{name} cannot be combined with structured output", param=name)
        if not all(self.bad_words):
            raise RequestError("bad_words contains an empty word", param="bad_words")
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
        """Check types here: a fractional count or a text as a seed would otherwise fail in a step, together
        with every request in that step."""
        for name, types in _TYPES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, types):
                expected = "a number" if float in types else "an integer"
                raise RequestError(f"{name} must be {expected}, not {value!r}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def named_ids(self) -> dict[str, Collection[int]]:
        """All token ids in these parameters, by the name of the parameter."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": [token for token, _ in self.logit_bias],
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": [token for word in self.bad_words for token in word],
        }

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        return self.penalizes or bool(self.bad_words)

    @property
    def penalizes(self) -> bool:
        """Whether the tokens so far change the logits of tokens with the same id."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
