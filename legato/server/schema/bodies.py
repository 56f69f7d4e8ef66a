"""The request bodies: types and ranges that can be checked without the model.

An instruction is obeyed or refused by name. An unsupported field is accepted only with a value that requests
nothing (`neutral`). A field that cannot change the reply is a label, accepted and ignored (`labels`);
docs/fields.md lists all of them. `null` means the default, as in OpenAI's API. Limits that depend on the
model or the server are checked in `legato.server.generation.parameters` and in the routes.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from legato.server.schema.base import NO_LIST, NONE, Body, Entries, Items, JsonObject
from legato.server.schema.structured_output import StructuredFields
from legato.server.schema.tools import AGENT_LABELS, Tool, ToolCall, ToolFields

_MAX_INT = 2**31 - 1
MAX_IDS = 1024
"""The most ids in `allowed_token_ids`. They are visited in every step."""

BadWord = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(Body):
    neutral = {"include_obfuscation": (None, False)}

    include_usage: bool = False
    """Sends one more chunk at the end, with the token counts."""
    continuous_usage_stats: bool = False
    """Adds the token counts so far to every chunk (vLLM)."""
    include_progress: bool = False
    """Sends chunks without choices that report the progress of the prompt, until the first token."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _any_of(first: dict[str, Any], *others: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [first, *others]})


_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}


class DynamoExtension(Body):
    """The fields that NVIDIA Dynamo's router adds: its own labels, and instructions for engines."""

    neutral = {
        "ignore_eos": (None, False),
        "top_k": (None, 0, -1),
        "repetition_penalty": (None, 1),
        "greed_sampling": (None, False),
        "use_raw_prompt": (None, False),
        "token_data": NONE,
        "max_thinking_tokens": NONE,
        "guided_json": NONE,
        "guided_regex": NONE,
        "guided_grammar": NONE,
        "guided_choice": NO_LIST,
        "extra_fields": NO_LIST,
    }
    location = "nvext"


class GenerationBody(StructuredFields):
    """The fields that completions and chat completions share."""

    neutral = {
        **StructuredFields.neutral,
        "use_beam_search": (None, False),
        "length_penalty": (None, 1),
        # As with vLLM's fast tokenizers, no spaces are added in either case.
        "spaces_between_special_tokens": (None, True, False),
        "logits_processors": NO_LIST,
        "kv_transfer_params": NONE,
        "vllm_xargs": (None, {}),
        "return_tokens_as_token_ids": (None, False),
        "lora_path": NONE,
        "session_params": NONE,
        "return_hidden_states": (None, False),
    }
    labels = AGENT_LABELS | {
        # OpenAI
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("store", "service_tier"),
        # Routers of vLLM and SGLang
        *("request_id", "rid", "data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
        # llama.cpp, Ollama, LM Studio: where a prompt or a model is kept
        *("cache_prompt", "id_slot", "keep_alive", "ttl"),
        # Gateways and editors
        *("litellm_call_id", "litellm_metadata", "litellm_session_id", "litellm_trace_id", "provider"),
        *("conversation_id", "opts", "session_id", "timestamp", "trace_id", "user_id"),
    }

    model: str | None = None
    """The served name. Default: the served model."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=_MAX_INT)
    best_of: int | None = None
    """Only as another name of `n`."""
    max_tokens: int | None = Field(None, ge=-1, le=_MAX_INT)
    """The most tokens of a reply. If the prompt leaves less room, the room is the limit. -1: no limit. 0:
    only with `prompt_logprobs` or `echo`."""
    max_completion_tokens: int | None = Field(None, ge=-1, le=_MAX_INT)
    """OpenAI's newer name of `max_tokens`."""
    min_tokens: int = Field(0, ge=0, le=_MAX_INT)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    """0 keeps only the most likely token."""
    top_k: int = Field(0, ge=-1, le=_MAX_INT)
    """0, -1 and values from the size of the vocabulary on keep all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    allowed_token_ids: Annotated[Items[int], Field(min_length=1, max_length=MAX_IDS)] | None = None
    """The only ids that may be sampled (vLLM)."""
    bad_words: Annotated[Items[BadWord], Field(max_length=128)] = []
    """Texts that the reply must not contain, as they are tokenized alone or after a space (vLLM)."""
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    logit_bias: Entries[Annotated[float, Field(ge=-100, le=100)]] = {}
    stop: Annotated[Items[str], BeforeValidator(_as_list), _any_of(_TEXT, _TEXTS)] = []
    stop_token_ids: Annotated[Items[int], Field(max_length=128)] = []
    ignore_eos: bool = False
    """Only `stop`, `stop_token_ids` and the length end a reply."""
    include_stop_str_in_output: bool = False
    """Keeps the stop string or stop token that ends the reply in its text (vLLM)."""
    skip_special_tokens: bool = True
    """Leaves special tokens out of the text (vLLM)."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=_MAX_INT)
    """Keeps only this many last tokens of a prompt. -1 keeps as many as fit (vLLM)."""
    prompt_logprobs: int | None = Field(None, ge=0, le=_MAX_INT)
    """Adds the log-probability of each prompt token, and of this many most likely tokens in its place
    (vLLM)."""
    return_token_ids: bool = False
    """Adds the token ids of prompt and reply to the response (vLLM)."""
    priority: int = Field(0, ge=-_MAX_INT, le=_MAX_INT)
    """A lower value is more urgent (vLLM)."""
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    """The request shares cached prefixes only with requests of the same salt (vLLM)."""
    tpot_target_ms: float | None = Field(None, gt=0, le=3_600_000)
    """The longest acceptable gap between two tokens of the reply, in milliseconds. Default: the server's
    target. In each step the strictest target of the running replies applies."""
    ttft_target_ms: float | None = Field(None, gt=0, le=3_600_000)
    """The latest acceptable first token, in milliseconds after arrival. It is counted in the metrics and
    does not change the schedule."""
    timeout: float | None = Field(None, gt=0, le=86400)
    """Seconds after arrival when the request ends with an error, whatever its state."""
    nvext: DynamoExtension | None = None
    """Fields of a router. Not used."""


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """A tuple of prompts, from one prompt or several, as text or token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", "must be a text, a list of token ids, or a list of either")
    if not value:
        raise PydanticCustomError("prompt", "is empty")
    if all(type(item) is int for item in value):
        return (tuple(value),)
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if not all(isinstance(item, list) and all(type(id) is int for id in item) for item in value):
        raise PydanticCustomError(
            "prompt", "must contain only texts, only token ids, or only lists of token ids"
        )
    return tuple(tuple(item) for item in value)


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    neutral = {**GenerationBody.neutral, "suffix": (None, "")}

    prompt: Annotated[
        tuple[str | tuple[int, ...], ...],
        PlainValidator(_prompts),
        _any_of(_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS}),
    ]
    echo: bool = False
    """Puts the prompt before the reply. With `logprobs`, as the text of its tokens, with their
    log-probabilities."""
    add_special_tokens: bool = True
    """Adds BOS and EOS if the model uses them (vLLM)."""
    logprobs: int | None = Field(None, ge=0, le=_MAX_INT)


class TextPart(Body):
    labels = AGENT_LABELS | {"annotations", "citations", "index", "logprobs"}
    other_types = {
        **dict.fromkeys(("image", "image_url", "input_image"), "images"),
        **dict.fromkeys(("audio_url", "input_audio"), "audio parts"),
        **dict.fromkeys(("video", "video_url"), "videos"),
        **dict.fromkeys(("file", "document", "input_file"), "files"),
    }
    location = "messages[].content[]"

    type: Literal["text"]
    text: str


def _parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a text or a list of text parts")
    return value


_PARTS: dict[str, Any] = {"type": "array", "items": TextPart.model_json_schema()}


class Message(Body):
    neutral = {
        "function_call": NONE,
        "refusal": NONE,
        "audio": NONE,
        # Other servers' fields for further input
        **dict.fromkeys(("images", "audios", "videos", "files", "attachments"), NO_LIST),
        "experimental_attachments": NO_LIST,
        # Other servers' names of continue_final_message
        **dict.fromkeys(("prefix", "partial"), (None, False)),
    }
    labels = AGENT_LABELS | {
        *("annotations", "created", "created_at", "createdAt", "finish_reason", "index", "logprobs", "model"),
        *("object", "opts", "response_metadata", "status", "timestamp", "usage", "weight"),
        *("experimental_providerMetadata", "providerMetadata", "providerOptions"),
    }
    location = "messages[]"

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Items[TextPart], BeforeValidator(_parts), _any_of(_TEXT, _PARTS)] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    """Only in messages of the assistant."""
    tool_call_id: str | None = None
    """The call whose result a tool's message contains."""
    reasoning_content: str | None = None
    """The assistant's reasoning before this message, as it was in an earlier response."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""

    @model_validator(mode="after")
    def _check_combination(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise _field_error("tool_calls", "is for the assistant's messages")
        if self.tool_call_id is None and self.role == "tool":
            raise _field_error("tool_call_id", "is required in a tool's message")
        if self.content is None and self.role not in ("assistant", "tool"):
            raise _field_error("content", "is required except in messages of assistants and tools")
        return self


def _field_error(field: str, problem: str) -> PydanticCustomError:
    """An error of one field that depends on other fields."""
    return PydanticCustomError("not_supported", problem, {"field": field})


def _only_false(think: bool) -> bool:
    if think:
        raise PydanticCustomError("not_supported", "true is not supported, only false")
    return think


class Conversation(Body):
    """Messages, and how a chat template turns them into a prompt."""

    messages: Items[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    """Ends the prompt where the assistant's reply begins."""
    continue_final_message: bool = False
    """Ends the prompt within the last message, so that the reply continues it (vLLM)."""
    add_special_tokens: bool = False
    """Adds BOS and EOS if the model uses them and the template did not add them (vLLM)."""
    chat_template_kwargs: JsonObject = {}
    """Further variables for the chat template."""
    tools: Annotated[Items[Tool], Field(max_length=128)] = []
    """The functions that the model may call."""
    think: Annotated[bool, AfterValidator(_only_false)] | None = None
    """false: a template with reasoning leaves it out (Ollama). true is not supported."""
    reasoning_effort: Literal["none"] | None = None
    """none: the same as `think` false. Other values are not supported."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables for the chat template."""
        without_reasoning = self.think is False or self.reasoning_effort == "none"
        return {**({"enable_thinking": False} if without_reasoning else {}), **self.chat_template_kwargs}


class ChatBody(GenerationBody, ToolFields, Conversation):
    """POST /v1/chat/completions"""

    neutral = {
        **GenerationBody.neutral,
        "functions": NO_LIST,
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": NONE,
        "prediction": NONE,
        "verbosity": NONE,
        "web_search_options": NONE,
        "moderation": NONE,
        "chat_template": NONE,  # A template is a program. Only the operator of the server may choose it.
        "documents": NO_LIST,
    }

    echo: bool = False
    """Puts the last message before the reply, if it is the assistant's (vLLM)."""
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=_MAX_INT)


class TokenizeTextBody(Body):
    """POST /tokenize with a text"""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    """Adds BOS and EOS if the model uses them."""
    parse_special: bool = False
    """Parses the names of special tokens as those tokens."""


class TokenizeChatBody(Conversation):
    """POST /tokenize with messages"""

    model: str | None = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Items[int]
