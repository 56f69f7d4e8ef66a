"""Structured output: the fields that ask for it, and the constraint that they make.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`. One of them at a time.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from legato.errors import RequestError
from legato.sampling_params import SamplingParams
from legato.server.strict import NONE, Body, Items, JsonObject
from legato.server.work_pool import WorkPool
from legato.text.grammar import Grammar, Grammars, choice_source, grammar_source, json_source, regex_source
from legato.text.grammar_trial import Schema, Source

MAX_CHOICES = 10_000

Choices = Annotated[Items[str], Field(min_length=1, max_length=MAX_CHOICES)]


def _read(value: object) -> object:
    """A schema that may be given as its text."""
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
    BeforeValidator(_read),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]

ANY_OBJECT: Mapping[str, object] = {"type": "object"}


class JsonSchemaFormat(Body):
    name: str = Field(min_length=1, max_length=256)
    """A label of the client's. Not used."""
    description: str | None = None
    """Not used: what the model is to know of the schema belongs in the messages."""
    schema_: JsonObject = Field(default_factory=dict, alias="schema")
    strict: bool = False
    """Refuse a schema with a keyword that is not supported, in place of leaving the keyword out."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _go_together(self) -> "ResponseFormat":
        if (self.json_schema is None) is (self.type == "json_schema"):
            raise PydanticCustomError("json_schema", "must have json_schema with type json_schema alone")
        return self


class StructuredOutputs(Body):
    """vLLM's. One of the fields is given."""

    neutral = {
        "structural_tag": NONE,
        "whitespace_pattern": NONE,
        "disable_any_whitespace": (None, False),
        "disable_additional_properties": (None, False),
    }

    json_: SchemaOrText | None = Field(None, alias="json")
    """A JSON Schema, as an object or as its text."""
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        if len(self.model_fields_set) != 1:
            raise PydanticCustomError("one", "must have one of json, json_object, regex, choice, grammar")
        return self


class StructuredFields(Body):
    """What a body may say of the form of its replies."""

    neutral = {"guided_decoding_backend": NONE, "guided_whitespace_pattern": NONE}

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


def asked_form(fields: StructuredFields) -> str | None:
    """The field that asks for a form; None if none does. Raises `RequestError` if several do."""
    names = [name for name in StructuredFields.model_fields if getattr(fields, name) is not None]
    if fields.response_format is not None and fields.response_format.type == "text":
        names.remove("response_format")
    if len(names) > 1:
        raise RequestError(f"{names[1]}: not together with {names[0]}", param=names[1])
    return names[0] if names else None


async def constraint(fields: StructuredFields, grammars: Grammars, work: WorkPool) -> Grammar | None:
    """The form of the replies; None for any. Raises `RequestError` that names the field."""
    name = asked_form(fields)
    if name is None:
        return None
    # In a thread: a schema may be large.
    param, source = await work.run_in_thread(1, partial(_source, fields, name, grammars))
    return await compiled(param, source, grammars)


async def compiled(param: str, source: Source, grammars: Grammars, *, quiet: bool = False) -> Grammar:
    """The grammar of `source`, which the field `param` asked for."""
    try:
        return await asyncio.wrap_future(grammars.compile(source, quiet=quiet))
    except RequestError as error:
        if error.param is not None:
            raise
        raise RequestError(f"{param}: {error.message}", param=param) from None


def content_form(format: ResponseFormat | None, grammars: Grammars) -> Schema | Literal["text"]:
    """What a `response_format` allows."""
    if format is None or format.type == "text":
        return "text"
    if format.json_schema is None:
        return grammars.schema(ANY_OBJECT, strict=True, name="response_format")
    name = "response_format.json_schema.schema"
    return grammars.schema(format.json_schema.schema_, strict=format.json_schema.strict, name=name)


def left_out_notices(form: Grammar | None) -> tuple[str, ...]:
    """What a client is told whose schemas have keywords that are not followed."""
    if form is None or not form.left_out:
        return ()
    return ("schema keywords left out: " + ", ".join(form.left_out),)


def constrained(
    params: SamplingParams, form: Grammar | None, *, ignore_eos: bool, eos_ids: frozenset[int]
) -> SamplingParams:
    """`params` of a reply that must have a form.

    Where the form is complete, an end-of-text token ends the reply, in any case. `ignore_eos` keeps the
    reply from ending as long as it can go on.
    """
    if form is None:
        return params
    if ignore_eos and params.stop_token_ids:
        raise RequestError(
            "ignore_eos: with a given form of the reply not together with stop_token_ids", param="ignore_eos"
        )
    return replace(
        params,
        constraint=form,
        stop_token_ids=params.stop_token_ids | eos_ids,
        min_tokens=params.max_tokens if ignore_eos else params.min_tokens,
    )


def _source(fields: StructuredFields, name: str, grammars: Grammars) -> tuple[str, Source]:
    """(the field to blame, the grammar)."""
    if name == "response_format":
        form = content_form(fields.response_format, grammars)
        assert form != "text"
        return form.name, json_source(form)
    if name == "structured_outputs":
        assert fields.structured_outputs is not None
        (kind,) = fields.structured_outputs.model_fields_set
        value = getattr(fields.structured_outputs, kind)
        kind = kind.rstrip("_")
        name = f"{name}.{kind}"
    else:
        kind, value = name.removeprefix("guided_"), getattr(fields, name)
    makers: dict[str, Callable[[], Source]] = {
        "json": lambda: json_source(grammars.schema(value, strict=True, name=name)),
        "json_object": lambda: json_source(grammars.schema(ANY_OBJECT, strict=True, name=name)),
        "regex": lambda: regex_source(value),
        "choice": lambda: choice_source(value),
        "grammar": lambda: grammar_source(value),
    }
    return name, makers[kind]()
