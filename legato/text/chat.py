"""Chat messages to one prompt, by the template that a model was trained with.

Finds a template (in a GGUF file, a model folder, a file, by name), checks messages, renders. Does not know
token ids: see `Tokenizer.encode_chat`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Final

from jinja2 import TemplateError, TemplateSyntaxError, meta

from legato.errors import ConfigError, ModelError, RequestError
from legato.text.builtin_templates import BUILTIN_TEMPLATES as BUILTIN_TEMPLATES
from legato.text.history import as_parts, readable, refuse_unread
from legato.text.json_object import read_json_object, read_small_file
from legato.text.origins import Origin, Written, joined, runs, with_origin, written
from legato.text.reading import Message as Message
from legato.text.reading import Reading, read_by
from legato.text.sandbox import Sandbox

_END = written("\ufdd0", Origin.END)
"""Marks where a message's content ends. It is known by its origin, which no other character has."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Templates write these into their markup, as in `'<|' + role + '|>'`."""

_OWN_TEXTS = frozenset({"content", "reasoning_content", "reasoning"})
"""Of an assistant's message: what the model wrote. Arguments of calls are not among it: they are data."""
_NO_EXTRA: Final[Mapping[str, object]] = MappingProxyType({})


class ChatTemplate:
    """A compiled template. Threads may share it; they render one after the other."""

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, tool_use: "ChatTemplate | None" = None
    ) -> None:
        """ModelError if `source` is no template; `bos_token` and `eos_token` are texts, "" for none.

        `tool_use` is used instead where there are tools.
        """
        self._sandbox = Sandbox()
        try:
            tree = self._sandbox.parse(source)
            self._names_tools = "tools" in meta.find_undeclared_variables(tree)
            self._template = self._sandbox.compile_bounded(tree)
        except TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from error
        except Exception as error:  # what the compiler makes of a strange template is open
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"chat template: {type(error).__name__}: {reason}") from error
        self._source = source
        self._tool_use = tool_use
        self._tokens = {
            "bos_token": written(bos_token, Origin.TEMPLATE),
            "eos_token": written(eos_token, Origin.TEMPLATE),
        }
        self._lock = Lock()

    @property
    def source(self) -> str:
        """The text of all templates that it has."""
        return self._source if self._tool_use is None else f"{self._source}\n{self._tool_use.source}"

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

    @cached_property
    def reading(self) -> Reading:
        """What it reads of conversations without tools, found out by probes."""
        return read_by(self._probe, has_developer="developer" in self._source)

    @property
    def changes(self) -> Sequence[str]:
        """What is changed in conversations so that it reads them, or refused: one line each."""
        of_tools = self._tool_use.reading.changes() if self._tool_use is not None else []
        return [*dict.fromkeys([*self.reading.changes(), *of_tools])]

    @property
    def takes_tools(self) -> bool:
        """Whether it has a place for tools."""
        own = self._names_tools and self.reading.tools
        return own or (self._tool_use is not None and self._tool_use.takes_tools)

    @property
    def takes_results(self) -> bool:
        """Whether it writes the results of tools."""
        return (self._tool_use or self).reading.reads("tool")

    @property
    def takes_system(self) -> bool:
        """Whether it writes a system's message."""
        return self.reading.takes_system

    def refuse_unread(self, messages: Sequence[Mapping[str, object]]) -> None:
        """RequestError if it would drop a message, so that the answer would be to another conversation."""
        refuse_unread(messages, self.reading)

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
        if self._tool_use is not None and (tools or any(map(_is_of_tools, messages))):
            return self._tool_use.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                extra=extra,
            )
        reserved = extra.keys() & {*self._tokens, "messages", "tools", "add_generation_prompt"}
        if reserved:
            raise RequestError(
                f"chat_template_kwargs: {min(reserved)} is not a variable of its own",
                param="chat_template_kwargs",
            )
        if tools and not self.takes_tools:
            raise RequestError("this model's chat template has no place for tools", param="tools")
        reading = self.reading
        given, told = _given(messages, tools, reading)
        if tools and reading.tools_need_system and given[0]["role"] != "system":
            given.insert(0, _with_origins({"role": "system", "content": ""}))
        if continue_final_message:
            given[-1]["content"] = joined("", [str(given[-1]["content"]), _END])
        variables = {
            **extra,
            **self._tokens,
            "messages": [as_parts(message, reading) for message in given],
            "tools": told,
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

    def _probe(self, messages: Sequence[Message], tools: object) -> str | None:
        """The prompt for messages just as they are; None if the template raises an exception."""
        variables = {**self._tokens, "messages": [*messages], "tools": tools, "add_generation_prompt": True}
        try:
            with self._lock:
                return self._sandbox.render(self._template, variables)
        except Exception:
            return None


def _is_of_tools(message: object) -> bool:
    """Whether it is a call of a tool or a result."""
    return isinstance(message, dict) and bool(message.get("role") == "tool" or message.get("tool_calls"))


def _given(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None, reading: Reading
) -> tuple[list[Message], object]:
    """Messages and tools in the form that the template reads, with texts that know who wrote them."""
    try:
        given = [_with_origins(message) for message in readable(messages, reading)]
        return given, with_origin(list(tools), Origin.CLIENT) if tools else reading.no_tools
    except RecursionError:
        raise RequestError("messages or tools are nested too deeply", param="messages") from None


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


def template_from_gguf(metadata: Mapping[str, object], name: str = "default") -> str | None:
    """The template of this name in a GGUF file's metadata, None if it has none."""
    key = "tokenizer.chat_template" if name == "default" else f"tokenizer.chat_template.{name}"
    source = metadata.get(key)
    if source is not None and not isinstance(source, str):
        raise ModelError(f"{key} is of type {type(source).__name__}, not a text")
    return source


def template_from_folder(folder: Path, name: str = "default") -> str | None:
    """The template of this name in a Hugging Face model folder, None if it has none.

    In this order: a .jinja file, chat_template.json, tokenizer_config.json. A template without a name is
    the default.
    """
    additional = Path("additional_chat_templates", f"{name}.jinja")
    path = folder / ("chat_template.jinja" if name == "default" else additional)
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
            found = next((item.get("template") for item in named if item.get("name") == name), None)
        elif name != "default" and isinstance(found, str):
            found = None
        if isinstance(found, str):
            return found
        if found is not None:
            raise keys.error("chat_template", "a text, or a list of objects with name and template")
    return None
