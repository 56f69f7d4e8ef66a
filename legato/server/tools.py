"""The fields of a chat body that tell of tools: what can be called, what must be, what was."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from legato.server.strict import Body, JsonObject, unicode

Text = Annotated[str, AfterValidator(unicode)]


class FunctionTool(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")
    description: Text | None = None
    parameters: JsonObject | None = None
    """JSON Schema of the arguments; none are taken if left out."""
    strict: bool = False
    """Refuse a schema with a keyword that is not supported, in place of leaving the keyword out."""


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool


class CalledFunction(Body):
    name: Text
    arguments: Text
    """JSON, as text."""


class ToolCall(Body):
    """A call in an assistant's message, as an earlier answer had it."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Left over from a stream. Not used."""


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
        "tool_choice", 'must be none, auto, required or {{"type": "function", "function": {{"name": ..}}}}'
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
