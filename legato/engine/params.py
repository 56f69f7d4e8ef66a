"""The sampling parameters of the library. They are checked at once, and errors say what was expected.

`legato.SamplingParams` has vLLM's names and contains plain values and texts. With the model's tokenizer it
is converted to the engine's own parameters (`legato.sampling_params`) and to `DetokenizeOptions`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, SkipValidation, ValidationError, model_validator

from legato import sampling_params
from legato.config.faults import as_config_error
from legato.engine.output_processor import DetokenizeOptions
from legato.errors import RequestError
from legato.sampling_params import Constraint
from legato.text.sampling_defaults import SamplingDefaults
from legato.text.stop import StopStrings
from legato.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _Checked
else:

    class _Checked(type(BaseModel)):
        """Raises `RequestError` for an invalid call of the class."""

        def __call__(self, *arguments: object, **values: object) -> object:
            if arguments:
                raise RequestError(
                    f"{self.__name__} takes parameters by name: {self.__name__}(max_tokens=16)"
                )
            try:
                return super().__call__(**values)
            except ValidationError as error:
                raise _refusal(error, self) from None


EXPECTED = {
    "stop": "a text or a list of texts",
    "stop_token_ids": "a list of token ids",
    "bad_words": "a list of texts or of lists of token ids",
    "allowed_token_ids": "a list of token ids",
    "logit_bias": "numbers by token id, such as {5: -1.5}",
}
"""The expected form of parameters for which pydantic would list several types."""


def _refusal(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    name = str(error.errors()[0]["loc"][0])
    if name in EXPECTED:
        return RequestError(f"{kind.__name__}: {name} must be {EXPECTED[name]}", param=name)
    fault = as_config_error(error, kind.__name__, kind)
    return RequestError(fault.message.replace("no such setting", "no such parameter"), param=name)


class SamplingParams(BaseModel, metaclass=_Checked):
    """How the tokens of a reply are chosen, and when the reply ends."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    max_tokens: int = 16
    """The most tokens of the reply. 0 is allowed only with `prompt_logprobs`: there is no reply."""
    min_tokens: int = 0
    """The reply does not end before it has this many tokens."""
    temperature: float = 1.0
    """0 is greedy: always the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens. 0 and -1 keep all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability."""
    min_p: float = 0.0
    """Drop tokens that are less likely than this share of the most likely one."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Makes the reply repeatable."""
    stop: str | Sequence[str] = ()
    """Texts that end the reply. They are cut off."""
    stop_token_ids: set[int] | frozenset[int] | Sequence[int] = ()
    """Tokens that end the reply, in addition to the model's own."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or stop token that ends the reply in its text."""
    ignore_eos: bool = False
    """The model's own end tokens do not end the reply."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    bad_words: Sequence[str | Sequence[int]] = ()
    """Texts, or runs of token ids, that the reply must not contain."""
    allowed_token_ids: set[int] | frozenset[int] | Sequence[int] | None = None
    """The only tokens that may be sampled. None allows all."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    """Amounts that are added to the logits of tokens, by id."""
    logprobs: int | None = None
    """Return the log-probability of each token, and of this many most likely tokens in its place."""
    prompt_logprobs: int | None = None
    """The same for the prompt."""
    constraint: SkipValidation[Constraint | None] = None
    """A constraint on the reply, such as a compiled grammar of `legato.text.grammar`."""

    @model_validator(mode="after")
    def _check(self) -> "SamplingParams":
        if self.constraint is not None and not callable(getattr(self.constraint, "matcher", None)):
            raise RequestError("constraint must be a compiled grammar", param="constraint")
        self._for_engine((), frozenset())
        StopStrings(self._stops)
        return self

    def for_engine(self, tokenizer: Tokenizer) -> sampling_params.SamplingParams:
        """The engine's parameters, for the model with this tokenizer."""
        runs: dict[tuple[int, ...], None] = {}
        for word in self.bad_words:
            if isinstance(word, str):
                texts = (word, f" {word}")
                ids = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
                runs |= dict.fromkeys(map(tuple, ids))
            else:
                runs[tuple(word)] = None
        return self._for_engine(tuple(runs), frozenset() if self.ignore_eos else tokenizer.eos_ids)

    @property
    def detokenize_options(self) -> DetokenizeOptions:
        """How the text of the reply is made from its tokens."""
        return DetokenizeOptions(
            stop=self._stops,
            include_stop=self.include_stop_str_in_output,
            skip_special=self.skip_special_tokens,
        )

    @property
    def _stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _for_engine(
        self, bad_words: tuple[tuple[int, ...], ...], eos_ids: frozenset[int]
    ) -> sampling_params.SamplingParams:
        allowed, bias = self.allowed_token_ids, self.logit_bias
        return sampling_params.SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0) if self.top_k >= -1 else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            logit_bias=tuple(bias.items() if isinstance(bias, Mapping) else bias),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            allowed_token_ids=None if allowed is None else frozenset(allowed),
            bad_words=bad_words,
            stop_token_ids=frozenset(self.stop_token_ids) | eos_ids,
            constraint=self.constraint,
        )


def model_defaults(model: SamplingDefaults, **changes: Any) -> SamplingParams:
    """The model's own sampling parameters, with changes."""
    return SamplingParams(**{**model.changed, **changes})
