"""Compiles the constraint that a request's structured output fields describe."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from legato.errors import RequestError
from legato.sampling_params import SamplingParams
from legato.server.schema.structured_output import ResponseFormat, StructuredFields, constraint_field
from legato.server.transport.work_pool import WorkPool
from legato.text.grammar import Grammar, Grammars, choice_source, grammar_source, json_source, regex_source
from legato.text.grammar_trial import Schema, Source

ANY_OBJECT: Mapping[str, object] = {"type": "object"}


async def compile_constraint(fields: StructuredFields, grammars: Grammars, work: WorkPool) -> Grammar | None:
    """The constraint of the replies, or None. Raises `RequestError` that names the field."""
    name = constraint_field(fields)
    if name is None:
        return None
    # In a thread: a schema may be large.
    param, source = await work.run_in_thread(1, partial(_source, fields, name, grammars))
    return await compile_source(param, source, grammars)


async def compile_source(param: str, source: Source, grammars: Grammars, *, quiet: bool = False) -> Grammar:
    """The grammar of `source`. Errors name the field `param`."""
    try:
        return await asyncio.wrap_future(grammars.compile(source, quiet=quiet))
    except RequestError as error:
        if error.param is not None:
            raise
        raise RequestError(f"{param}: {error.message}", param=param) from None


def content_schema(response_format: ResponseFormat | None, grammars: Grammars) -> Schema | Literal["text"]:
    """The content that a `response_format` allows."""
    if response_format is None or response_format.type == "text":
        return "text"
    if response_format.json_schema is None:
        return grammars.schema(ANY_OBJECT, strict=True, name="response_format")
    schema = response_format.json_schema
    name = "response_format.json_schema.schema"
    return grammars.schema(schema.schema_, strict=schema.strict, name=name)


def left_out_notices(constraint: Grammar | None) -> tuple[str, ...]:
    """The notice that lists the schema keywords which are not enforced, if there are any."""
    if constraint is None or not constraint.left_out:
        return ()
    return ("schema keywords left out: " + ", ".join(constraint.left_out),)


def with_constraint(
    params: SamplingParams, constraint: Grammar | None, *, ignore_eos: bool, eos_ids: frozenset[int]
) -> SamplingParams:
    """`params` of a reply that must follow a constraint.

    If the reply is complete by the constraint, an end-of-sequence token always ends it. With `ignore_eos`,
    the reply does not end as long as it can continue.
    """
    if constraint is None:
        return params
    if ignore_eos and params.stop_token_ids:
        raise RequestError(
            "ignore_eos: with structured output not together with stop_token_ids", param="ignore_eos"
        )
    return replace(
        params,
        constraint=constraint,
        stop_token_ids=params.stop_token_ids | eos_ids,
        min_tokens=params.max_tokens if ignore_eos else params.min_tokens,
    )


def _source(fields: StructuredFields, name: str, grammars: Grammars) -> tuple[str, Source]:
    """The path of the field for errors, and the source of the grammar."""
    if name == "response_format":
        schema = content_schema(fields.response_format, grammars)
        assert schema != "text"
        return schema.name, json_source(schema)
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
