"""How models write calls of tools, by family: the form, a grammar that allows nothing else, and words that
explain it to a model whose chat template does not.

Does not know token ids (but that of a marker) or OpenAI's bodies; see `tool_call_parser` for the way back.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from legato.errors import RequestError
from legato.text.chat import ChatTemplate, Message
from legato.text.grammar import WHITESPACE
from legato.text.grammar_trial import Schema, Source, schema_at


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """`marker before call after between call after .. close`, each call a JSON object of a name and
    arguments. Blanks may stand wherever JSON has them."""

    name: str
    marker: str = ""
    """The text, or the special token, that begins calls; "" if a reply that calls is nothing but the call."""
    before: str = ""
    after: str = ""
    between: str | None = None
    """None where a reply has one call at most."""
    close: str = ""
    arguments: str = "arguments"
    """The key beside "name"."""
    short_ids: bool = False
    """Whether templates take only ids of nine letters and digits."""

    def written(self, calls: Sequence[tuple[str, object]]) -> str:
        """Calls, (name, arguments) each, as the model would write them. At least one."""
        made = [
            json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False) + self.after
            for name, arguments in calls
        ]
        return self.marker + self.before + (self.between or "\n").join(made) + self.close


HERMES: Final = ToolFormat(
    name="hermes",
    marker="<tool_call>",
    before="\n",
    after="\n</tool_call>",
    between="\n<tool_call>\n",
)
FORMATS: Final = {
    format.name: format
    for format in (
        HERMES,
        ToolFormat(name="llama3_json", arguments="parameters"),
        ToolFormat(
            name="mistral", marker="[TOOL_CALLS]", before="[", between=", ", close="]", short_ids=True
        ),
    )
}
"""By vLLM's names of its parsers. hermes is that of Hermes 2 and 3, Qwen 2.5 and 3 as well."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one model is told of tools and calls them."""

    format: ToolFormat
    native: bool
    """Whether its chat template explains tools; else we do."""

    def __str__(self) -> str:
        return f"{self.format.name}, explained by " + ("the chat template" if self.native else "the server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """What can be called."""

    name: str
    schema: Schema
    """Of its arguments, which are an object."""


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
            return ToolUse(format, True)
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


# -- the grammar ---------------------------------------------------------------------------------------------

_BLANK = f"WS: /({WHITESPACE})?/"
_TEXT = "TEXT: /(?s:.*)/"


def calls_source(
    format: ToolFormat,
    functions: Sequence[Function],
    *,
    content: Schema | Literal["text"] | None,
    parallel: bool,
    marker_id: int | None = None,
) -> Source:
    """A grammar of replies that call.

    `content` is what a reply may be instead: nothing, JSON, or text, which may also come before the first
    call. `marker_id` is the marker's special token.
    """
    marker = f"<[{marker_id}]>" if marker_id is not None else _quoted(format.marker)
    opening = f"{marker} {_literal(format.before)}"
    more = f"({_literal(format.between)} call)*" if parallel and format.between is not None else ""
    calls = f"call {more} {_literal(format.close)}"
    rules = [_BLANK]
    schemas = [function.schema for function in functions]
    if content is None:
        rules.append(f"start: {opening} {calls}")
    elif isinstance(content, Schema):
        rules += [f"start: content | {opening} {calls}", f"content: %json {schema_at(len(schemas))}"]
        schemas.append(content)
    else:
        rules += [_TEXT, *_freely(functions, f"{_literal(format.before)} {calls}", marker)]
    rules.append("call: " + " | ".join(f"call{i} rest{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        rules += [
            f'call{i}: WS "{{" WS "\\"name\\"" WS ":" WS {json.dumps(json.dumps(function.name))}',
            f"rest{i}: bare{i} {_literal(format.after)}",
            f'bare{i}: WS "," WS "\\"{format.arguments}\\"" WS ":" WS args{i} WS "}}"',
            f"args{i}: %json {schema_at(i)}",
        ]
    return Source(format="lark", text="\n".join(rules), schemas=tuple(schemas))


def _freely(functions: Sequence[Function], calls: str, marker: str) -> list[str]:
    """Rules for text, calls after text, or a call without a marker.

    Lazy tokens end where they first can: text with the first marker in it, after which `calls` must follow;
    and what begins as a call of a known function must go on as one.
    """
    ways = ["TEXT", *(f'lead{i} bare{i} (WS "```")?' for i in range(len(functions)))]
    rules = [
        rf'lead{i}[lazy]: /[ \n]*(```(json)?[ \n]*)?\{{[ \n]*"name"[ \n]*:[ \n]*"{re.escape(function.name)}"/'
        for i, function in enumerate(functions)
    ]
    if marker.startswith("<"):
        ways.append(f"TEXT? {marker} {calls}")
    elif marker:
        ways.append(f"open {calls}")
        rules.append(f"open[lazy]: TEXT {marker}")
    return ["start: " + " | ".join(ways), *rules]


def _quoted(text: str) -> str:
    """Lark for a text of the form; nothing for none."""
    return json.dumps(text) if text else ""


def _literal(text: str | None) -> str:
    """The same, and blanks before it."""
    return f"WS {json.dumps(text.strip())}" if text is not None and text.strip() else ""


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
