"""Checks and converts what users of the library pass: prompts, conversations, sampling parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypeGuard

from legato.core.request import Request
from legato.core.step_plan import TokenLogprobs
from legato.engine.build import LoadedModel
from legato.engine.output_processor import Delta, DetokenizeOptions
from legato.engine.params import SamplingParams, model_defaults
from legato.engine.requests import new_request
from legato.errors import RequestError


class Array(Protocol):
    """An array of NumPy, a tensor of torch and the like."""

    def tolist(self) -> Any: ...


Prompt = str | Sequence[int] | Array
Message = Mapping[str, object]

A_PROMPT = "a prompt is a text or a list of token ids"
PARAMS = "params must be SamplingParams, or a list with one for each prompt"
A_CONVERSATION = 'a conversation is a list of messages such as {"role": "user", "content": "Hello"}'


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and the reply to it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Every generated token, including a stop token."""
    text: str
    finish_reason: str
    """stop, length, constraint (it allows no further token) or error."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """One entry per token, if `SamplingParams.logprobs` is set."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry per prompt token, if `SamplingParams.prompt_logprobs` is set. The first has no
    log-probability."""
    message: str = ""
    """The failure, if `finish_reason` is constraint or error."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready for the engine, and how its text is made."""

    request: Request
    text: DetokenizeOptions

    def completion(self, deltas: Sequence[Delta]) -> Completion:
        """The completion from all deltas of the reply."""
        sampled = tuple(delta.sampled for delta in deltas if delta.sampled is not None)
        scored = tuple(token for delta in deltas for token in delta.prompt)
        finish, params = deltas[-1].finish, self.request.params
        assert finish is not None
        return Completion(
            prompt_token_ids=self.request.prompt,
            token_ids=tuple(token.token for token in sampled),
            text="".join(delta.text for delta in deltas),
            finish_reason=finish.reason.value,
            logprobs=None if params.logprobs is None else sampled,
            prompt_logprobs=None if params.prompt_logprobs is None else scored,
            message=finish.message,
        )


def prepare(model: LoadedModel, prompt: Prompt, params: SamplingParams | None) -> PreparedRequest:
    """A request for one prompt. Raises `RequestError`, also if it can never be served."""
    if params is None:
        params = model_defaults(model.sampling_defaults)
    if not isinstance(params, SamplingParams):
        raise RequestError(f"{PARAMS}, not {_type_name(params)}", param="params")
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else as_ids(prompt)
    request = new_request(ids, params.for_engine(model.tokenizer), arrival=model.engine.clock())
    model.engine.scheduler.validate(request)
    return PreparedRequest(request, params.detokenize_options)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one or several. A text or a sequence of ids is one prompt, a 2-d array is
    several."""
    if isinstance(prompts, str):
        return [prompts]
    entries = _without_array(prompts)
    if not _is_list(entries):
        raise RequestError(f"{A_PROMPT}, or a list of such; this is {_type_name(prompts)}", param="prompts")
    many: list[Any] = [_without_array(prompt) for prompt in entries]
    num_ids = sum(isinstance(prompt, Integral) for prompt in many)
    if 0 < num_ids < len(many):
        raise RequestError("prompts mix token ids with texts or lists", param="prompts")
    if num_ids:
        return [many]
    for index, prompt in enumerate(many):
        if not isinstance(prompt, str) and not _is_list(prompt):
            raise RequestError(f"prompts[{index}]: {A_PROMPT}, not {_type_name(prompt)}", param="prompts")
    return many


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    """One entry for each prompt."""
    if isinstance(params, SamplingParams | None):
        return [params] * num_prompts
    if not _is_list(params):
        raise RequestError(f"{PARAMS}, not {_type_name(params)}", param="params")
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} params for {num_prompts} prompts: {PARAMS}", param="params")
    return params


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """A list of conversations from one or several."""
    if not _is_list(messages) or not messages:
        raise RequestError(f"{A_CONVERSATION}; this is {_type_name(messages)}", param="messages")
    are_many = all(_is_list(entry) for entry in messages)
    many: list[list[Any]] = [list(entry) for entry in (messages if are_many else [messages])]
    for conversation in many:
        for message in conversation or [conversation]:
            if not isinstance(message, Mapping):
                raise RequestError(f"{A_CONVERSATION}; this contains {_type_name(message)}", param="messages")
    return many


def chat_prompt(
    model: LoadedModel,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """The token ids of a conversation, with the model's chat template."""
    if model.chat_template is None:
        raise RequestError(
            f"{model.name} has no chat template: use generate, a chat model, or "
            "ModelSettings(chat_template=...)",
            param="messages",
        )
    prompt = model.chat_template.render(
        [dict(message) for message in messages],
        tools=tools,
        extra=chat_template_kwargs or {},
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
    )
    model.chat_template.refuse_unread(messages)
    return model.tokenizer.encode_chat(prompt)


def as_ids(prompt: Sequence[int] | Array) -> list[int]:
    """Token ids as Python integers."""
    entries = _without_array(prompt)
    if not _is_list(entries):
        raise RequestError(f"{A_PROMPT}, not {_type_name(prompt)}", param="prompts")
    ids: list[Any] = [_without_array(token) for token in entries]
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(
                f"{A_PROMPT}; the list has {_type_name(token)} at index {index}", param="prompts"
            )
    return [int(token) for token in ids]


def _without_array(value: object) -> object:
    """An array as a list or a number. Any other value unchanged."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _type_name(value: object) -> str:
    """The type of a value, for errors. Never the value, which may be a prompt."""
    return "an empty list" if isinstance(value, list) and not value else f"a {type(value).__name__}"
