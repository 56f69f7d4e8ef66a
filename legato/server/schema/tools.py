"""The fields about tools: their definitions, the choice among them, and earlier calls."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from legato.server.schema.base import Body, JsonObject

AGENT_LABELS = frozenset({"cache_control", "extra_content", "id", "metadata", "provider_specific_fields"})
"""Labels that editors, agents and gateways add to everything that they send."""


class FunctionTool(Body):
    labels = AGENT_LABELS
    location = "tools[].function"

    name: str = Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: JsonObject | None = None
    """JSON Schema of the arguments. Without it, the function takes none."""
    strict: bool = False
    """Refuse a schema with an unsupported keyword. Otherwise the keyword is left out."""


class Tool(Body):
    labels = AGENT_LABELS
    other_types = {"custom": "custom tools", "mcp": "MCP tools", "web_search": "built-in tools"}
    location = "tools[]"

    type: Literal["function"]
    function: FunctionTool


def _as_text(arguments: object) -> object:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


_TEXT_OR_OBJECT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "object"}]}


class CalledFunction(Body):
    labels = AGENT_LABELS
    location = "messages[].tool_calls[].function"

    name: str
    arguments: Annotated[str, BeforeValidator(_as_text), WithJsonSchema(_TEXT_OR_OBJECT)] = ""
    """JSON as text or, as some clients send it, as an object."""


class ToolCall(Body):
    """A call in an assistant's message, as it was in an earlier response."""

    labels = (AGENT_LABELS - {"id"}) | {"index", "status", "thought_signature"}
    other_types = {"custom": "custom tools"}
    location = "messages[].tool_calls[]"

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """The one function that must be called."""

    name: str


def _choice(value: object) -> str | NamedChoice:
    if value in ("none", "auto", "required"):
        return str(value)
    if isinstance(value, dict) and value.keys() == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str):
            return NamedChoice(function["name"])
    raise PydanticCustomError(
        "tool_choice", 'must be none, auto, required or {"type": "function", "function": {"name": ..}}'
    )


_NAMED_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}


class ToolFields(Body):
    """The choice among the tools."""

    tool_choice: Annotated[
        str | NamedChoice,
        PlainValidator(_choice),
        WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_SCHEMA]}),
    ] = "auto"
    """none: the tools are not part of the prompt. auto: the model may call. required: the model must call."""
    parallel_tool_calls: bool = True
    """Whether a reply may contain several calls, if the model's tool format supports it."""
