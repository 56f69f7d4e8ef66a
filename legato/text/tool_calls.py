"""In which form a model calls tools, and words that explain it to a model whose chat template does not.

Does not know token ids or OpenAI's bodies. The form itself is in `tool_format`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from legato.errors import RequestError
from legato.text.chat import ChatTemplate, Message
from legato.text.tool_format import FORMATS, HERMES, ToolFormat


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one model is told of tools and calls them."""

    format: ToolFormat
    native: bool
    """Whether its chat template explains tools; else we do."""

    def __str__(self) -> str:
        return f"{self.format.name}, explained by " + ("the chat template" if self.native else "the server")


@lru_cache(maxsize=16)
def tool_use(template: ChatTemplate, asked: str = "auto") -> ToolUse:
    """The use that goes with a chat template: of the format `asked` for, or of the one in which the template
    writes a call. A template that knows no tools, or writes calls in a form that is none of `FORMATS`, gets
    hermes in our words."""
    if asked != "auto":
        return ToolUse(FORMATS[asked], template.takes_tools)
    written = _probed(template)
    for format in FORMATS.values():
        if re.search(_probe_pattern(format), written):
            return ToolUse(format, template.takes_tools and template.takes_results)
    return ToolUse(HERMES, False)


_PROBE = "a_function"


def _probed(template: ChatTemplate) -> str:
    """A call as the template writes it; "" if it does not."""
    function = {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
    call = {"name": _PROBE, "arguments": {"key": "value"}}
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "x", "tool_call_id": "abcdefghi", "name": _PROBE},
    ]
    try:
        return template.render(messages, tools=[{"type": "function", "function": function}])
    except RequestError:
        return ""


def _probe_pattern(format: ToolFormat) -> str:
    parts = (format.marker, format.before, "{", '"name"', ":", f'"{_PROBE}"', ",", f'"{format.arguments}"')
    return r"\s*".join(re.escape(part.strip()) for part in parts)


# -- our own words -------------------------------------------------------------------------------------------


def in_plain_words(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]], format: ToolFormat, *, system: bool
) -> list[Message]:
    """The conversation for a template that knows no tools: these are explained in the system's message,
    calls are the assistant's text, and results are the user's.

    `system` says whether the template takes a system's message; else the first user's begins with it.
    Neighbours of one role become one message, as many templates want them to alternate.
    """
    plain: list[Message] = []
    if tools:
        plain.append({"role": "system", "content": _explained(tools, format)})
    for message in messages:
        calls = message.get("tool_calls")
        if message["role"] == "tool":
            _join(plain, "user", f"<tool_response>\n{_text(message)}\n</tool_response>")
        elif isinstance(calls, list) and calls:
            written = format.written([_call(call) for call in calls])
            _join(plain, "assistant", "\n".join(filter(None, (_text(message), written))))
        else:
            role = "system" if message["role"] == "developer" else str(message["role"])
            _join(plain, role, _text(message))
    if system:
        return plain
    joined: list[Message] = []
    for message in plain:
        _join(joined, "user" if message["role"] == "system" else str(message["role"]), _text(message))
    return joined


def _explained(tools: Sequence[Mapping[str, object]], format: ToolFormat) -> str:
    listed = "\n".join(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools)
    example = format.written([("NAME", {"ARGUMENT": "VALUE"})])
    several = "" if format.between is None else " Several calls may follow each other."
    return (
        f"These functions can be called; their arguments are described by JSON Schemas.\n\n{listed}\n\n"
        "Where one of them helps with the answer, reply with a call of it and nothing else, in this form:\n\n"
        f"{example}\n\nThe result comes back between <tool_response> and </tool_response>.{several} "
        "Otherwise answer as usual."
    )


def _join(messages: list[Message], role: str, text: str) -> None:
    """Add a message, or its text to the last one if that is of the same role."""
    if messages and messages[-1]["role"] == role:
        messages[-1] = {"role": role, "content": f"{messages[-1]['content']}\n\n{text}"}
    else:
        messages.append({"role": role, "content": text})


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _call(call: object) -> tuple[str, object]:
    """(name, arguments) of a call in OpenAI's form, whose arguments are JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError("a tool call has no function", param="messages")
    arguments = function.get("arguments")
    try:
        return str(function.get("name")), json.loads(str(arguments)) if arguments else {}
    except (ValueError, RecursionError):
        return str(function.get("name")), arguments
