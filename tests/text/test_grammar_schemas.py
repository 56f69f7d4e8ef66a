"""Random texts of many schemas, each checked by jsonschema: a grammar allows what its schema means."""

import json
import random
from collections.abc import Mapping

import jsonschema
import pytest
from grammar_rig import EOS, compiled, ids_of

from legato.text.grammar import Grammar, Grammars, json_source

MOST = 400
"""Tokens after which a walk is given up."""

SCHEMAS: dict[str, dict[str, object]] = {
    "scalars": {
        "type": "object",
        "properties": {"s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "null"}},
        "required": ["s", "i"],
        "additionalProperties": False,
    },
    "enums and constants": {
        "type": "array",
        "items": {"enum": ["ä", 'a"b', "\\", "🦊", 1, 2.5, True, None, [1], {"a": 1}]},
        "minItems": 1,
        "maxItems": 4,
    },
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        "maxItems": 3,
    },
    "tuples": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"const": "x"}],
        "items": {"type": "null"},
        "minItems": 2,
        "maxItems": 4,
    },
    "references": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "numbers": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": -5, "maximum": 123},
            "b": {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
            "c": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 999},
        },
        "required": ["a", "b", "c"],
        "additionalProperties": False,
    },
    "texts": {
        "type": "object",
        "properties": {
            "p": {"type": "string", "pattern": "^[a-f]{2,5}-[0-9]+$"},
            "l": {"type": "string", "minLength": 3, "maxLength": 6},
            "d": {"type": "string", "format": "date"},
            "u": {"type": "string", "format": "uuid"},
        },
        "required": ["p", "l", "d", "u"],
        "additionalProperties": False,
    },
    "unicode keys": {
        "type": "object",
        "properties": {"größe": {"enum": ["klein", "groß"]}, "名": {"const": "李"}, 'q"': {"type": "null"}},
        "required": ["größe", "名", 'q"'],
        "additionalProperties": False,
    },
    "one of several": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}},
                "required": ["kind", "x"],
            },
            {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]},
            {"type": ["integer", "boolean"]},
        ]
    },
    "all of several": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "further properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
        "required": ["a"],
    },
    "anything": {},
}


def walk(grammar: Grammar, rng: random.Random) -> str | None:
    """A random text of this form; None if it gets too long. Likes to close what is open."""
    matcher, text = grammar.matcher(), b""
    while len(text) < MOST:
        allowed = ids_of(matcher.mask(text))
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return text.decode()
        going_on = [id for id in allowed if id < EOS]
        closing = [id for id in going_on if id in {*b'"}]'}]
        usual = [id for id in going_on if chr(id).isalnum() or id > 127]
        ids = (
            closing if closing and rng.random() < 0.4 else usual if usual and rng.random() < 0.8 else going_on
        )
        text += bytes([rng.choice(ids)])
    return None


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_every_text_that_a_grammar_allows_fits_the_schema(
    grammars: Grammars, schema: Mapping[str, object]
) -> None:
    grammar = compiled(grammars, json_source(grammars.schema(schema, strict=True)))
    texts = [walk(grammar, random.Random(seed)) for seed in range(12)]
    complete = [text for text in texts if text is not None]
    assert len(complete) >= 3
    for text in complete:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
