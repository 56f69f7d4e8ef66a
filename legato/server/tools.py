"""The fields of a chat body that tell of tools: what can be called, what must be, what was."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from legato.server.strict import Body, JsonObject

OF_AGENTS = frozenset({"cache_control", "extra_content", "id", "metadata", "provider_specific_fields"})
"""Labels that editors, agents and gateways put into whatever they send."""


class FunctionTool(Body):
    labels = OF_AGENTS
    place = "tools[].function"

    name: str = Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: JsonObject | None = None
    """JSON Schema of the arguments; none are taken if left out."""
    strict: bool = False
    """Refuse a schema with a keyword that is not supported, in place of leaving the keyword out."""


class Tool(Body):
    labels = OF_AGENTS
    other_types = {"custom": "custom tools", "mcp": "MCP tools", "web_search": "built-in tools"}
    place = "tools[]"

    type: Literal["function"]
    function: FunctionTool


def _as_text(arguments: object) -> object:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


_TEXT_OR_OBJECT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "object"}]}


class CalledFunction(Body):
    labels = OF_AGENTS
    place = "messages[].tool_calls[].function"

    name: str
    arguments: Annotated[str, BeforeValidator(_as_text), WithJsonSchema(_TEXT_OR_OBJECT)] = ""
    """JSON, as text or, from some clients, as an object."""


class ToolCall(Body):
    """A call in an assistant's message, as an earlier answer had it."""

    labels = (OF_AGENTS - {"id"}) | {"index", "status", "thought_signature"}
    other_types = {"custom": "custom tools"}
    place = "messages[].tool_calls[]"

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


@dataclass(frozen=True, slots=True)
class Named:
    """The one function that must be called."""

    name: str


def _choice(value: object) -> str | Named:
    if value in ("none", "auto", "required"):
        return str(value)
    if isinstance(value, dict) and value.keys() == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str):
            return Named(function["name"])
    raise PydanticCustomError(
        "tool_choice", 'must be none, auto, required or {"type": "function", "function": {"name": ..}}'
    )


_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}


class ToolFields(Body):
    """Which of the tools are called."""

    tool_choice: Annotated[
        str | Named,
        PlainValidator(_choice),
        WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]}),
    ] = "auto"
    """none: the model is not told of any. auto: it may call. required: it must."""
    parallel_tool_calls: bool = True
    """Whether a reply may have several calls, where the model's form has room for them."""
