"""From what a library's user passes to requests: prompts, conversations, parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypeGuard

from legato.core.request import Request
from legato.core.step_plan import TokenLogprobs
from legato.engine.build import Built
from legato.engine.output import Delta, TextRules, new_request
from legato.engine.params import SamplingParams, defaults_of
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
    """One prompt and what became of it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Every generated token, a stop token included."""
    text: str
    finish_reason: str
    """stop, length, constraint (it cannot be followed any further) or error."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """One entry a token, if `SamplingParams.logprobs` asked for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry a token of the prompt, if `SamplingParams.prompt_logprobs` asked for them; the first one has
    no log-probability."""
    message: str = ""
    """What failed, if `finish_reason` is constraint or error."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is ready for the engine, and how its text is made."""

    request: Request
    text: TextRules

    def completion(self, deltas: Sequence[Delta]) -> Completion:
        """All of the reply."""
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


def ask(built: Built, prompt: Prompt, params: SamplingParams | None) -> Asked:
    """A request for one prompt. Raises `RequestError`, also if it can never be served."""
    if params is None:
        params = defaults_of(built.sampling_defaults)
    if not isinstance(params, SamplingParams):
        raise RequestError(f"{PARAMS}, not {_kind(params)}", param="params")
    ids = built.tokenizer.encode(prompt) if isinstance(prompt, str) else checked_ids(prompt)
    request = new_request(ids, params.for_engine(built.tokenizer), arrival=built.engine.clock())
    built.engine.scheduler.validate(request)
    return Asked(request, params.text_rules)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text is one, and so is a sequence of ids. An array of two dimensions is many."""
    if isinstance(prompts, str):
        return [prompts]
    entries = _plain(prompts)
    if not _is_list(entries):
        raise RequestError(f"{A_PROMPT}, or a list of such; this is {_kind(prompts)}", param="prompts")
    many: list[Any] = [_plain(prompt) for prompt in entries]
    num_ids = sum(isinstance(prompt, Integral) for prompt in many)
    if 0 < num_ids < len(many):
        raise RequestError("prompts mix token ids with texts or lists", param="prompts")
    for place, prompt in enumerate([] if num_ids else many):
        if not isinstance(prompt, str) and not _is_list(prompt):
            raise RequestError(f"prompts[{place}]: {A_PROMPT}, not {_kind(prompt)}", param="prompts")
    return [many] if num_ids else many


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    """One for each prompt."""
    if isinstance(params, SamplingParams | None):
        return [params] * num_prompts
    if not _is_list(params):
        raise RequestError(f"{PARAMS}, not {_kind(params)}", param="params")
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} params for {num_prompts} prompts: {PARAMS}", param="params")
    return params


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """One conversation or many."""
    if not _is_list(messages) or not messages:
        raise RequestError(f"{A_CONVERSATION}; this is {_kind(messages)}", param="messages")
    are_many = all(_is_list(entry) for entry in messages)
    many: list[list[Any]] = [list(entry) for entry in (messages if are_many else [messages])]
    for conversation in many:
        for message in conversation or [conversation]:
            if not isinstance(message, Mapping):
                raise RequestError(f"{A_CONVERSATION}; this has {_kind(message)} in it", param="messages")
    return many


def chat_prompt(
    built: Built,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """The token ids of a conversation, as the model's chat template writes it."""
    if built.chat_template is None:
        raise RequestError(
            f"{built.name} has no chat template: use generate, a model made for chats, or "
            "ModelSettings(chat_template=...)",
            param="messages",
        )
    prompt = built.chat_template.render(
        [dict(message) for message in messages],
        tools=tools,
        extra=chat_template_kwargs or {},
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
    )
    built.chat_template.refuse_unread(messages)
    return built.tokenizer.encode_chat(prompt)


def checked_ids(prompt: Sequence[int] | Array) -> list[int]:
    """Token ids, every one an integer of Python's own."""
    entries = _plain(prompt)
    if not _is_list(entries):
        raise RequestError(f"{A_PROMPT}, not {_kind(prompt)}", param="prompts")
    ids: list[Any] = [_plain(token) for token in entries]
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"{A_PROMPT}; the list has {_kind(token)} at place {place}", param="prompts")
    return [int(token) for token in ids]


def _plain(value: object) -> object:
    """An array as the list or the number that it holds; what is no array as it is."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _kind(value: object) -> str:
    """The type of a value, in words; never the value: it may be a prompt."""
    return "an empty list" if isinstance(value, list) and not value else f"a {type(value).__name__}"
