"""Keywords of schemas that cannot be followed: left out and named, or refused by name. N-03, N-12."""

import json
import logging
import random
from typing import Any

import jsonschema
import pytest
from grammar_rig import compiled, takes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legato.errors import RequestError
from legato.text.fake import FakeTokenizer
from legato.text.grammar import GrammarLimits, Grammars, json_source

CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "look-ahead": ({"type": "string", "pattern": "^(?!-)[a-z]+$"}, ["pattern"]),
    "look-behind": ({"type": "string", "pattern": "(?<=a)b"}, ["pattern"]),
    "back-reference": ({"type": "string", "pattern": r"(a)\1"}, ["pattern"]),
    "a pattern that is no expression": ({"type": "string", "pattern": "(a"}, ["pattern"]),
    "a pattern that is no text": ({"type": "string", "pattern": 5}, ["pattern"]),
    "remote reference": ({"$ref": "http://localhost/x"}, ["$ref"]),
    "dangling reference": ({"$ref": "#/$defs/no"}, ["$ref"]),
    "dynamic reference": ({"$dynamicRef": "#x"}, ["$dynamicRef"]),
    "unknown dialect": ({"$schema": "http://localhost/x", "type": "string"}, ["$schema"]),
    "one of overlapping": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"]),
    "contains": ({"type": "array", "contains": {"const": 1}, "minContains": 1}, ["contains", "minContains"]),
    "unique items": ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
    "if": ({"if": {}, "then": {}, "else": {}}, ["if", "then", "else"]),
    "not": ({"not": {"type": "integer"}}, ["not"]),
    "dependent required": ({"type": "object", "dependentRequired": {"a": ["b"]}}, ["dependentRequired"]),
    "dependent schemas": ({"type": "object", "dependentSchemas": {"a": {}}}, ["dependentSchemas"]),
    "names of properties": ({"type": "object", "propertyNames": {"pattern": "a"}}, ["propertyNames"]),
    "unevaluated": ({"type": "object", "unevaluatedProperties": False}, ["unevaluatedProperties"]),
    "number of properties that are not all required": (
        {"type": "object", "properties": {"a": {}}, "minProperties": 2},
        ["minProperties"],
    ),
    "unknown format": ({"type": "string", "format": "int32"}, ["format"]),
    "unknown type": ({"type": "str"}, ["type"]),
    "a type that is none": ({"type": ["string", None]}, ["type"]),
    "a length that is a text": ({"type": "string", "minLength": "5"}, ["minLength"]),
    "a bound that is a text": ({"type": "integer", "maximum": "9"}, ["maximum"]),
    "required that is no list": ({"type": "object", "required": "a"}, ["required"]),
    "an enum that is no list": ({"enum": "a"}, ["enum"]),
    "properties that are no object": ({"type": "object", "properties": ["a"]}, ["properties"]),
    "a property that is no schema": ({"properties": {"a": "string"}}, ["properties.a"]),
    "one of the ways is no schema": ({"anyOf": [{"type": "null"}, 5]}, ["anyOf[1]"]),
    "no ways": ({"anyOf": {"a": 1}}, ["anyOf"]),
    "a pattern of names": ({"patternProperties": {"(?=a)": {}, "^b": {}}}, ['patternProperties["(?=a)"]']),
    "patterns of names that overlap": (
        {"patternProperties": {"^a": {"type": "null"}, "a$": {}}},
        ['patternProperties["a$"]'],
    ),
    "several": (
        {"type": "string", "pattern": "(?=a)", "format": "x", "minLength": 1, "not": {}},
        ["pattern", "format", "not"],
    ),
}
PLACES: dict[str, Any] = {
    "": lambda schema: schema,
    ".properties.a": lambda schema: {"type": "object", "properties": {"ok": {"type": "null"}, "a": schema}},
    '.properties["a b"].items': lambda schema: {"properties": {"a b": {"type": "array", "items": schema}}},
    ".$defs.d": lambda schema: {"$defs": {"d": schema}, "type": "array", "items": {"$ref": "#/$defs/d"}},
    ".anyOf[1]": lambda schema: {"anyOf": [{"type": "null"}, schema]},
    ".prefixItems[0].additionalProperties": lambda schema: {
        "prefixItems": [{"type": "object", "additionalProperties": schema}]
    },
}


@pytest.mark.parametrize(("place", "around"), PLACES.items(), ids=PLACES.keys())
@pytest.mark.parametrize(("schema", "names"), CASES.values(), ids=CASES.keys())
def test_what_cannot_be_followed_is_left_out_and_told_or_refused_where_it_stands(
    grammars: Grammars, schema: dict[str, Any], names: list[str], place: str, around: Any
) -> None:
    whole = around(schema)
    grammar = compiled(grammars, json_source(grammars.schema(whole, strict=False, name="it")))
    assert grammar.left_out == tuple(f"it{place}.{name}" for name in names)
    with pytest.raises(RequestError) as refused:
        compiled(grammars, json_source(grammars.schema(whole, strict=True, name="it")))
    assert refused.value.message.startswith(f"it{place}.{names[0]}: ")
    assert refused.value.param == "it"


def test_a_refusal_names_no_option_that_a_client_cannot_set(grammars: Grammars) -> None:
    schema = grammars.schema(CASES["one of overlapping"][0], strict=True, name="it")
    with pytest.raises(RequestError) as refused:
        compiled(grammars, json_source(schema))
    assert refused.value.message == "it.oneOf: oneOf constraints are not supported"


def test_what_can_be_followed_still_is(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {
            "p": {"type": "string", "pattern": "^(?!-)", "maxLength": 3},
            "city": {"enum": ["Paris", "Rome"]},
            "x": {"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 5}], "not": {"const": 3}},
        },
        "required": ["p", "city", "x"],
        "additionalProperties": False,
    }
    grammar = compiled(grammars, json_source(grammars.schema(schema, strict=False)))
    assert takes(grammar, '{"p": "-", "city": "Rome", "x": 3}')
    for text in ('{"p": "abcd", "city": "Rome", "x": 3}', '{"p": "", "city": "Bonn", "x": 3}', '{"p": ""}'):
        assert not takes(grammar, text)
    assert not takes(grammar, '{"p": "a", "city": "Rome", "x": "3"}')


NULLS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {
            "type": "string",
            "pattern": None,
            "minLength": None,
            "enum": None,
            "maxLength": 2,
            "items": None,
        },
        "b": {"const": None},
        "c": None,
        "d": {"type": None, "properties": None, "required": None, "anyOf": None, "$ref": None, "not": None},
    },
    "required": ["a", "b", "c", "d"],
    "additionalProperties": False,
    "minProperties": None,
    "$defs": None,
}


@pytest.mark.parametrize("strict", [False, True])
def test_null_means_absent(grammars: Grammars, strict: bool) -> None:
    grammar = compiled(grammars, json_source(grammars.schema(NULLS, strict=strict)))
    assert grammar.left_out == ()
    assert takes(grammar, '{"a": "xy", "b": null, "c": [1], "d": {"e": 1}}')
    assert not takes(grammar, '{"a": "xyz", "b": null, "c": [1], "d": 1}')
    assert not takes(grammar, '{"a": "xy", "b": 1, "c": [1], "d": 1}')


def test_a_schema_that_nothing_fits_is_refused_strict_or_not(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"allOf": [{"type": "string"}, {"type": "array"}]}},
        "required": ["a"],
    }
    for strict in (False, True):
        with pytest.raises(RequestError, match="Unsatisfiable") as refused:
            compiled(grammars, json_source(grammars.schema(schema, strict=strict, name="it")))
        assert refused.value.param == "it"


def test_the_log_has_one_line_for_each_grammar_whose_length_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grammars = Grammars(FakeTokenizer(), 258)
    schema = {"properties": {f"p{i}": {"not": {"const": "secret"}} for i in range(100)}}
    for _ in range(3):
        compiled(grammars, json_source(grammars.schema(schema, strict=False, name="it")))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "it.properties.p0.not, " in line
    assert line.endswith(" and 80 more")
    assert "\n" not in line
    assert "secret" not in line


def test_many_faults_are_found_within_the_limits() -> None:
    """A large interface description: what is common in such is known by one place alone."""
    grammars = Grammars(FakeTokenizer(), 258, limits=GrammarLimits(compile_s=30))
    properties = {
        f"p{i}": {"type": "string", "description": f"number {i}", "format": "int32" if i % 4 == 0 else "date"}
        for i in range(600)
    }
    grammar = compiled(grammars, json_source(grammars.schema({"properties": properties}, strict=False)))
    assert len(grammar.left_out) == 150


# -- random schemas ------------------------------------------------------------------------------------------

LEAVES = st.sampled_from(
    [
        {"type": "string", "maxLength": 4},
        {"enum": ["a", 5, None]},
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"type": "boolean"},
        {"$ref": "#/$defs/d"},
    ]
)
GOOD = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            }
        ),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=2).map(lambda ways: {"anyOf": ways}),
    ),
    max_leaves=6,
)
BAD: list[tuple[str, Any]] = [
    ("not", {"const": 1}),
    ("pattern", "(?=a)"),
    ("format", "no such"),
    ("minLength", "1"),
    ("uniqueItems", True),
    ("contains", {"type": "null"}),
    ("dependentRequired", {"a": ["b"]}),
    ("if", {}),
]
OF_STRINGS = ("pattern", "format", "minLength")


def nodes_of(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(path, schema) of all the schemas in one, in the order of the text."""
    found = [("", schema)]
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            inner = [(f".{key}.{name}", child) for name, child in value.items()]
        elif key == "anyOf":
            inner = [(f".{key}[{i}]", child) for i, child in enumerate(value)]
        else:
            inner = [(".items", value)] if key == "items" else []
        found += [(where + path, node) for where, child in inner for path, node in nodes_of(child)]
    return found


@given(
    good=st.dictionaries(st.sampled_from("xy"), GOOD, min_size=1),
    faults=st.lists(st.tuples(st.integers(0, 99), st.integers(0, len(BAD) - 1)), min_size=1, max_size=5),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_of_any_schema_exactly_the_faults_are_left_out(
    grammars: Grammars, good: dict[str, Any], faults: list[tuple[int, int]]
) -> None:
    good = {**good, "z": {"$ref": "#/$defs/d"}}
    whole: dict[str, Any] = {
        "$defs": {"d": {"type": "boolean"}},
        "type": "object",
        "properties": good,
        "required": [*good],
        "additionalProperties": False,
    }
    faulty = json.loads(json.dumps(whole))  # no two places are one object
    nodes, put = nodes_of(faulty), set()
    for where, which in faults:
        path, node = nodes[where % len(nodes)]
        name, value = BAD[which]
        if name in OF_STRINGS and node.get("type") != "string":  # there it means nothing
            name, value = BAD[0]
        node[name] = value
        put.add(f"it{path}.{name}")
    grammar = compiled(grammars, json_source(grammars.schema(faulty, strict=False, name="it")))
    assert {*grammar.left_out} == put
    assert len(grammar.left_out) == len(put)
    with pytest.raises(RequestError) as refused:
        compiled(grammars, json_source(grammars.schema(faulty, strict=True, name="it")))
    assert refused.value.message.partition(": ")[0] in put
    jsonschema.Draft202012Validator.check_schema(whole)
    rng = random.Random(len(put))
    text = json.dumps(value_of(whole, whole, rng))
    assert takes(grammar, text)
    assert not takes(grammar, text.replace(":", ": [[[[", 1))


def value_of(schema: dict[str, Any], root: dict[str, Any], rng: random.Random) -> Any:
    """A value that fits one of the schemas above."""
    if "$ref" in schema:
        return value_of(root["$defs"]["d"], root, rng)
    if "anyOf" in schema:
        return value_of(rng.choice(schema["anyOf"]), root, rng)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if schema["type"] == "object":
        return {name: value_of(child, root, rng) for name, child in schema["properties"].items()}
    if schema["type"] == "array":
        return [value_of(schema["items"], root, rng) for _ in range(rng.randrange(3))]
    return {"string": "abc", "integer": 42, "boolean": True}[schema["type"]]


def test_the_log_has_the_path_without_names_that_may_be_text(
    grammars: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients choose the names of properties, and an answer's header tells them all."""
    secret = 'my password is "hunter2"] \n \u00e9'
    faulty = {"type": "string", "minLength": "long"}
    schema = {"properties": {secret: faulty, "city": faulty, "n" * 1000: faulty}}
    grammar = compiled(grammars, json_source(grammars.schema(schema, strict=False, name="it")))
    assert grammar.left_out[0] == f"it.properties[{json.dumps(secret)}].minLength"
    assert len(grammar.left_out) == 3
    (line,) = caplog.messages
    assert "it.properties[...].minLength, it.properties.city.minLength, it.properties.nnn" in line
    assert "hunter2" not in line
    assert "\n" not in line
    assert len(line) < 400
