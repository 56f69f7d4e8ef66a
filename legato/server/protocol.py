"""The request bodies, field by field: types and ranges that need no model to be checked.

A field that is an instruction is obeyed, or refused by name: one that is not supported is accepted only with
the value that asks for nothing, listed under `neutral`. A field that asks nothing of the model is a label,
listed under `labels`, accepted and ignored; `docs/fields.md` has them all. `null` means the default, as in
OpenAI's API. Limits that depend on the model or the server are checked in `sampling` and in the endpoints.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from legato.server.strict import NO_LIST, NONE, Body, Entries, Items, JsonObject
from legato.server.structured import StructuredFields
from legato.server.tools import OF_AGENTS, Tool, ToolCall, ToolFields

_MAX_INT = 2**31 - 1
MAX_IDS = 1024
"""Ids that a reply may be made of: they are looked through in every step."""


BadWord = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(Body):
    neutral = {"include_obfuscation": (None, False)}

    include_usage: bool = False
    """One more chunk before the end, with the token counts."""
    continuous_usage_stats: bool = False
    """The token counts so far in every chunk (vLLM)."""
    include_progress: bool = False
    """Chunks without choices that say how far the prompt is, until the first token."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _schema_of(one: dict[str, Any], *others: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [one, *others]})


_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}


class DynamoExtension(Body):
    """What NVIDIA Dynamo's router adds: labels for itself, and instructions for engines."""

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
    place = "nvext"


class GenerationBody(StructuredFields):
    """What both ways to ask for replies share."""

    neutral = {
        **StructuredFields.neutral,
        "use_beam_search": (None, False),
        "length_penalty": (None, 1),
        "spaces_between_special_tokens": (
            None,
            True,
            False,
        ),  # as with vLLM's fast tokenizers, none are added
        "logits_processors": NO_LIST,
        "kv_transfer_params": NONE,
        "vllm_xargs": (None, {}),
        "return_tokens_as_token_ids": (None, False),
        "lora_path": NONE,
        "session_params": NONE,
        "return_hidden_states": (None, False),
    }
    labels = OF_AGENTS | {
        # OpenAI
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("store", "service_tier"),
        # routers of vLLM and SGLang
        *("request_id", "rid", "data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
        # llama.cpp, Ollama, LM Studio: where a prompt or a model is kept
        *("cache_prompt", "id_slot", "keep_alive", "ttl"),
        # gateways and editors
        *("litellm_call_id", "litellm_metadata", "litellm_session_id", "litellm_trace_id", "provider"),
        *("conversation_id", "opts", "session_id", "timestamp", "trace_id", "user_id"),
    }

    model: str | None = None
    """The served name; the served model if left out."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=_MAX_INT)
    best_of: int | None = None
    """Only as a second name for `n`."""
    max_tokens: int | None = Field(None, ge=-1, le=_MAX_INT)
    """A limit: if the prompt leaves less room, it is that room. -1: no limit. 0: only where the prompt
    is asked about."""
    max_completion_tokens: int | None = Field(None, ge=-1, le=_MAX_INT)
    """OpenAI's newer name of `max_tokens`."""
    min_tokens: int = Field(0, ge=0, le=_MAX_INT)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    """0 keeps the most likely token alone."""
    top_k: int = Field(0, ge=-1, le=_MAX_INT)
    """0, -1 and anything from the vocabulary's size on keep all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    allowed_token_ids: Annotated[Items[int], Field(min_length=1, max_length=MAX_IDS)] | None = None
    """The only ids that may be sampled (vLLM)."""
    bad_words: Annotated[Items[BadWord], Field(max_length=128)] = []
    """Texts that a reply does not write as they are tokenized by themselves or behind a space (vLLM)."""
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    logit_bias: Entries[Annotated[float, Field(ge=-100, le=100)]] = {}
    stop: Annotated[Items[str], BeforeValidator(_listed), _schema_of(_TEXT, _TEXTS)] = []
    stop_token_ids: Annotated[Items[int], Field(max_length=128)] = []
    ignore_eos: bool = False
    """Only `stop`, `stop_token_ids` and the length end a reply."""
    include_stop_str_in_output: bool = False
    """What ends the reply stays in its text (vLLM)."""
    skip_special_tokens: bool = True
    """Tokens that steer the model add no text (vLLM)."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=_MAX_INT)
    """Only so many last tokens of a prompt are used; -1 for as many as fit (vLLM)."""
    prompt_logprobs: int | None = Field(None, ge=0, le=_MAX_INT)
    """Adds the log-probability of each prompt token, and so many most likely ones in its place (vLLM)."""
    return_token_ids: bool = False
    """Adds the ids of prompt and reply to the answer (vLLM)."""
    priority: int = Field(0, ge=-_MAX_INT, le=_MAX_INT)
    """The lower, the more urgent (vLLM)."""
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    """The request shares computed prefixes only with others of the same salt (vLLM)."""
    tpot_target_ms: float | None = Field(None, gt=0, le=3_600_000)
    """Milliseconds between two tokens of the reply that are not to be exceeded; the server's if left out.
    While it decodes, the steps keep to the strictest."""
    ttft_target_ms: float | None = Field(None, gt=0, le=3_600_000)
    """Milliseconds from arrival by which the first token is wanted. Metrics count it; it hastens nothing."""
    timeout: float | None = Field(None, gt=0, le=86400)
    """Seconds from arrival after which the request ends with an error, wherever it is then."""
    nvext: DynamoExtension | None = None
    """Of a router. Not used."""


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, as text or token ids, always as a tuple of prompts."""
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
            "prompt", "must hold only texts, only token ids, or only lists of token ids"
        )
    return tuple(tuple(item) for item in value)


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    neutral = {**GenerationBody.neutral, "suffix": (None, "")}

    prompt: Annotated[
        tuple[str | tuple[int, ...], ...],
        PlainValidator(_prompts),
        _schema_of(_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS}),
    ]
    echo: bool = False
    """Puts the prompt's text before the reply's; with `logprobs`, what its tokens spell, and theirs too."""
    add_special_tokens: bool = True
    """Adds BOS and EOS where the model wants them (vLLM)."""
    logprobs: int | None = Field(None, ge=0, le=_MAX_INT)


class TextPart(Body):
    labels = OF_AGENTS | {"annotations", "citations", "index", "logprobs"}
    other_types = {
        **dict.fromkeys(("image", "image_url", "input_image"), "images"),
        **dict.fromkeys(("audio_url", "input_audio"), "audio parts"),
        **dict.fromkeys(("video", "video_url"), "videos"),
        **dict.fromkeys(("file", "document", "input_file"), "files"),
    }
    place = "messages[].content[]"

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
        # more input, in the words of other servers
        **dict.fromkeys(("images", "audios", "videos", "files", "attachments"), NO_LIST),
        "experimental_attachments": NO_LIST,
        # to be continued, in the words of other servers: here it is continue_final_message
        **dict.fromkeys(("prefix", "partial"), (None, False)),
    }
    labels = OF_AGENTS | {
        *("annotations", "created", "created_at", "createdAt", "finish_reason", "index", "logprobs", "model"),
        *("object", "opts", "response_metadata", "status", "timestamp", "usage", "weight"),
        *("experimental_providerMetadata", "providerMetadata", "providerOptions"),
    }
    place = "messages[]"

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Items[TextPart], BeforeValidator(_parts), _schema_of(_TEXT, _PARTS)] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    """The assistant's."""
    tool_call_id: str | None = None
    """Which call's result a tool's message is."""
    reasoning_content: str | None = None
    """The assistant's thoughts before this message, as an earlier answer had them."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""

    @model_validator(mode="after")
    def _go_together(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise _at("tool_calls", "is for the assistant's messages")
        if self.tool_call_id is None and self.role == "tool":
            raise _at("tool_call_id", "is required in a tool's message")
        if self.content is None and self.role not in ("assistant", "tool"):
            raise _at("content", "is required but in messages of assistants and tools")
        return self


def _at(field: str, problem: str) -> PydanticCustomError:
    """What is wrong with one field in the light of others."""
    return PydanticCustomError("not_supported", problem, {"field": field})


def _no_demand(think: bool) -> bool:
    if think:
        raise PydanticCustomError("not_supported", "true is not supported, only false")
    return think


class Conversation(Body):
    """Messages, and how a chat template makes a prompt of them."""

    messages: Items[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    """Ends the prompt where the assistant's answer begins."""
    continue_final_message: bool = False
    """Ends the prompt with the last message, left open, so that the reply continues it (vLLM)."""
    add_special_tokens: bool = False
    """Adds BOS and EOS where the model wants them and the template did not (vLLM)."""
    chat_template_kwargs: JsonObject = {}
    """Further variables for the chat template."""
    tools: Annotated[Items[Tool], Field(max_length=128)] = []
    """What the model may call."""
    think: Annotated[bool, AfterValidator(_no_demand)] | None = None
    """false: a template that has thoughts leaves them out (Ollama). true is not supported."""
    reasoning_effort: Literal["none"] | None = None
    """none: as `think` false. Other amounts are not supported."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables for the chat template."""
        without = self.think is False or self.reasoning_effort == "none"
        return {**({"enable_thinking": False} if without else {}), **self.chat_template_kwargs}


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
        "chat_template": NONE,  # a template is a program: the server's operator chooses it
        "documents": NO_LIST,
    }

    echo: bool = False
    """Puts the last message before the reply, if it is the assistant's (vLLM)."""
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=_MAX_INT)


class TokenizeTextBody(Body):
    """POST /tokenize of a text"""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    """Adds BOS and EOS where the model wants them."""
    parse_special: bool = False
    """Reads the names of special tokens as those tokens."""


class TokenizeChatBody(Conversation):
    """POST /tokenize of messages"""

    model: str | None = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Items[int]
