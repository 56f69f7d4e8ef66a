"""The fields for structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`.

A request may use one of them.
"""

import json
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from legato.errors import RequestError
from legato.server.schema.base import NONE, Body, Items, JsonObject

MAX_CHOICES = 10_000

Choices = Annotated[Items[str], Field(min_length=1, max_length=MAX_CHOICES)]


def _parse(value: object) -> object:
    """A schema may also be given as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise PydanticCustomError("schema", "is not valid JSON") from None
    if not isinstance(value, dict):
        raise PydanticCustomError("schema", "must be a JSON object, or the text of one")
    return value


SchemaOrText = Annotated[
    JsonObject,
    BeforeValidator(_parse),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]


class JsonSchemaFormat(Body):
    name: str = Field(min_length=1, max_length=256)
    """A label. Not used."""
    description: str | None = None
    """Not used: put what the model should know about the schema into the messages."""
    schema_: JsonObject = Field(default_factory=dict, alias="schema")
    strict: bool = False
    """Refuse a schema with an unsupported keyword. Otherwise the keyword is left out."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_combination(self) -> "ResponseFormat":
        if (self.json_schema is None) is (self.type == "json_schema"):
            raise PydanticCustomError("json_schema", "must have json_schema with type json_schema alone")
        return self


class StructuredOutputs(Body):
    """vLLM's field. Exactly one of its fields is given."""

    neutral = {
        "structural_tag": NONE,
        "whitespace_pattern": NONE,
        "disable_any_whitespace": (None, False),
        "disable_additional_properties": (None, False),
    }

    json_: SchemaOrText | None = Field(None, alias="json")
    """A JSON Schema, as an object or as text."""
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _check_combination(self) -> "StructuredOutputs":
        if len(self.model_fields_set) != 1:
            raise PydanticCustomError("one", "must have one of json, json_object, regex, choice, grammar")
        return self


class StructuredFields(Body):
    """The fields that constrain the replies of a request."""

    neutral = {"guided_decoding_backend": NONE, "guided_whitespace_pattern": NONE}

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


def constraint_field(fields: StructuredFields) -> str | None:
    """The name of the field that constrains the replies, if any. Raises `RequestError` if several do."""
    names = [name for name in StructuredFields.model_fields if getattr(fields, name) is not None]
    if fields.response_format is not None and fields.response_format.type == "text":
        names.remove("response_format")
    if len(names) > 1:
        raise RequestError(f"{names[1]}: not together with {names[0]}", param=names[1])
    return names[0] if names else None
