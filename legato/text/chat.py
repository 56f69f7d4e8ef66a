"""Chat messages to one prompt, by the template that a model was trained with.

Finds a template (in a GGUF file, a model folder, a file, by name), checks messages, renders. Does not know
token ids: see `Tokenizer.encode_chat`.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Final

from jinja2 import TemplateError, TemplateSyntaxError, meta

from legato.errors import ConfigError, ModelError, RequestError
from legato.text.json_object import read_json_object, read_small_file
from legato.text.origins import Origin, Written, joined, runs, with_origin, written
from legato.text.sandbox import Sandbox

Message = dict[str, object]

_END = written("\ufdd0", Origin.END)
"""Marks where a message's content ends. It is known by its origin, which no other character has."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Templates write these into their markup, as in `'<|' + role + '|>'`."""

_OWN_TEXTS = frozenset({"content", "reasoning_content", "reasoning"})
"""Of an assistant's message: what the model wrote. Arguments of calls are not among it: they are data."""
_NO_EXTRA: Final[Mapping[str, object]] = MappingProxyType({})


class ChatTemplate:
    """A compiled template. Threads may share it; they render one after the other."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        """ModelError if `source` is no template; `bos_token` and `eos_token` are texts, "" for none."""
        self._source = source
        self._sandbox = Sandbox()
        try:
            tree = self._sandbox.parse(source)
            self._takes_tools = "tools" in meta.find_undeclared_variables(tree)
            self._takes_developers = "developer" in source
            self._template = self._sandbox.compile_bounded(tree)
        except TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from error
        except Exception as error:  # what the compiler makes of a strange template is open
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"chat template: {type(error).__name__}: {reason}") from error
        self._source = source
        self._tokens = {
            "bos_token": written(bos_token, Origin.TEMPLATE),
            "eos_token": written(eos_token, Origin.TEMPLATE),
        }
        self._lock = Lock()

    @property
    def source(self) -> str:
        return self._source

    @cached_property
    def turns(self) -> tuple[Written, Written]:
        """What it writes up to the end of a reply, and from there to the end of the next message. Empty if
        that cannot be told."""
        reply = "the reply"
        messages: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "x"},
        ]
        nothing = written("", Origin.TEMPLATE)
        try:
            prompt = self.render(messages, add_generation_prompt=False)
        except RequestError:
            return nothing, nothing
        end = prompt.rfind(reply) + len(reply)
        return (prompt[:end], prompt[end:]) if reply in prompt else (nothing, nothing)

    @property
    def takes_tools(self) -> bool:
        """Whether it has a place for tools."""
        return self._takes_tools

    @cached_property
    def takes_system(self) -> bool:
        """Whether it writes a system's message, wherever that may be."""
        word = "beforehand"
        try:
            return word in self.render(
                [{"role": "system", "content": word}, {"role": "user", "content": "x"}]
            )
        except RequestError:
            return False

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, object] = _NO_EXTRA,
    ) -> Written:
        """The prompt for `messages` in OpenAI's form; it says which parts of it the template wrote.

        `extra` holds further variables of the template (`enable_thinking` and the like). RequestError if
        the messages are malformed, the template refuses them, or it has no place for tools.

        With `continue_final_message` the prompt ends where the last message does, without what the template
        writes behind it.
        """
        reserved = extra.keys() & {*self._tokens, "messages", "tools", "add_generation_prompt"}
        if reserved:
            raise RequestError(
                f"chat_template_kwargs: {min(reserved)} is not a variable of its own",
                param="chat_template_kwargs",
            )
        if tools and not self._takes_tools:
            raise RequestError("this model's chat template has no place for tools", param="tools")
        checked = [self._checked(message, f"messages[{i}]") for i, message in enumerate(messages)]
        given = [_with_origins(message) for message in checked]
        if continue_final_message:
            given[-1]["content"] = joined("", [str(given[-1].get("content") or ""), _END])
        variables = {
            **extra,
            **self._tokens,
            "messages": given,
            "tools": with_origin(list(tools), Origin.CLIENT) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with self._lock:
                prompt = self._sandbox.render(self._template, variables)
        except TemplateError as error:
            raise RequestError(f"chat template: {error.message}", param="messages") from error
        except Exception as error:  # a template can raise anything; its text may hold the prompt's
            raise RequestError(
                f"the chat template fails with these messages ({type(error).__name__})", param="messages"
            ) from error

        return _up_to_end(prompt) if continue_final_message else prompt

    def _checked(self, message: object, where: str) -> Message:
        """The message as this template expects it. Templates that know no developers would drop their
        messages, or refuse them: for those a developer is the system, as OpenAI's models have it."""
        checked = _checked(message, where)
        if checked["role"] == "developer" and not self._takes_developers:
            checked["role"] = "system"
        return checked


def _with_origins(message: Message) -> Message:
    """The message with texts that know who wrote them."""
    role = str(message["role"])
    own = Origin.ASSISTANT if role == "assistant" else Origin.CLIENT
    return {
        key: written(role, Origin.TEMPLATE if role in _ROLES else Origin.CLIENT)
        if key == "role"
        else with_origin(value, own if key in _OWN_TEXTS else Origin.CLIENT)
        for key, value in message.items()
    }


def _up_to_end(prompt: Written) -> Written:
    """What a template wrote before and of a message whose content ends in `_END`."""
    ends = [end for run in runs(prompt, Origin.END) for end in range(*run)]
    if len(ends) != 1:
        raise RequestError(
            "the chat template does not write the last message once, so it cannot be continued",
            param="continue_final_message",
        )
    return prompt[: ends[0]]


def _checked(message: object, where: str) -> Message:
    """The message as templates expect it: content a text, arguments of tool calls an object."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _refusal(f"{where} is not an object with a role")
    checked = dict(message)
    tool_calls = message.get("tool_calls")
    if isinstance(tool_calls, list):
        checked["tool_calls"] = [_with_arguments_read(call) for call in tool_calls]
    content = message.get("content")
    if isinstance(content, list):
        checked["content"] = "\n".join(
            _text_of(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        )
    elif content is None:
        if message["role"] != "assistant" or not tool_calls:
            raise _refusal(f"{where}.content is null; only an assistant message with tool_calls may lack it")
        checked["content"] = ""  # many templates write or strip it without a look
    elif not isinstance(content, str):
        raise _refusal(f"{where}.content is neither a text nor a list of parts")
    return checked


def _text_of(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise _refusal(f"{where} is not an object")
    if part.get("type") != "text":
        raise _refusal(f"{where} has type {part.get('type')!r}; only 'text' is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise _refusal(f"{where}.text is not a text")
    return text


def _with_arguments_read(call: object) -> object:
    """OpenAI sends a tool call's arguments as JSON text; templates write them as JSON themselves."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    try:
        arguments = json.loads(call["function"].get("arguments"))
    except (TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages")


def load_template(name_or_path: str) -> str:
    """The template that a setting names: a built-in name, a .jinja file, or the template itself (has a "{").

    ConfigError if it is none of these or the file cannot be read.
    """
    if name_or_path in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[name_or_path]
    if "{" in name_or_path:
        return name_or_path
    path = Path(name_or_path)
    if path.suffix != ".jinja":
        names = ", ".join(BUILTIN_TEMPLATES)
        raise ConfigError(
            f"no chat template {name_or_path!r}; give one of {names}, or a .jinja file", param="chat_template"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", error)
        raise ConfigError(
            f"chat template {path}: cannot be read ({reason})", param="chat_template"
        ) from error


def template_from_gguf(metadata: Mapping[str, object]) -> str | None:
    """The template in a GGUF file's metadata, None if it has none."""
    source = metadata.get("tokenizer.chat_template")
    if source is not None and not isinstance(source, str):
        raise ModelError(f"tokenizer.chat_template is of type {type(source).__name__}, not a text")
    return source


def template_from_folder(folder: Path) -> str | None:
    """The template of a Hugging Face model folder, None if it has none.

    In this order: chat_template.jinja, chat_template.json, tokenizer_config.json. Of several named ones the
    one called "default".
    """
    path = folder / "chat_template.jinja"
    content = read_small_file(path)
    if content is not None:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: is not UTF-8 at byte {error.start}") from error
    for path in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        keys = read_json_object(path, optional=True)
        found = keys.get("chat_template")
        if isinstance(found, list):
            named = [item for item in found if isinstance(item, dict)]
            found = next((item.get("template") for item in named if item.get("name") == "default"), None)
        if isinstance(found, str):
            return found
        if found is not None:
            raise keys.error("chat_template", "a text, or a list of objects with name and template")
    return None


_NO_TOOL_CALLS = """\
    {%- if message.tool_calls or message.role == 'tool' %}
        {{- raise_exception('this chat template has no place for tool calls') }}
    {%- endif %}
"""

_CHATML = (
    "{%- for message in messages %}\n"
    + _NO_TOOL_CALLS
    + """\
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
)

_LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    + _NO_TOOL_CALLS
    + """\
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
)

# Mistral and Gemma have no system turn: its text begins the first user turn. Turns must alternate.
_ALTERNATING = (
    """\
{{- bos_token }}
{%- set system = '' %}
{%- set turns = messages %}
{%- if messages and messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- for message in turns %}
"""
    + _NO_TOOL_CALLS
    + """\
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('roles must alternate user/assistant, beginning with user') }}
    {%- endif %}
    {%- set text = (system if loop.first else '') + message.content | trim %}
"""
)

_MISTRAL = (
    _ALTERNATING
    + """\
    {%- if message.role == 'user' %}
        {{- '[INST] ' + text + '[/INST]' }}
    {%- else %}
        {{- ' ' + text + eos_token }}
    {%- endif %}
{%- endfor %}
"""
)

_GEMMA = (
    _ALTERNATING
    + """\
    {{- '<start_of_turn>' + ('user' if message.role == 'user' else 'model') + '\\n' }}
    {{- text + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
)

BUILTIN_TEMPLATES: Final[Mapping[str, str]] = MappingProxyType(
    {"chatml": _CHATML, "llama3": _LLAMA3, "mistral": _MISTRAL, "gemma": _GEMMA}
)
"""Templates for models whose files have none."""
