"""A process that tries out grammars from strangers, so that one that never ends, or takes all memory, or
crashes the library, costs this process and nothing else.

Run as a script, and alone: it imports nothing of Legato. It reads one JSON object a line and answers each
with one. The first is {"num_ids", "memory_bytes", "seconds", "limits"}, the others are {"format", "text",
"schemas"}: `text` refers to each of the JSON Schemas {"text", "strict"} by its number between two NULs.
Answers have "grammar", the text in the library's own form, and "left_out", (schema, path) of each keyword
that the library cannot follow. Or "error" is not empty; "schema" and "path" say where, if that is known.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

Path = tuple[Any, ...]
"""Keys and indices from a schema's root to a keyword."""
Compile = Callable[[str, str], tuple[str, LLMatcher | None]]
"""(format, text) -> (the error, the matcher)."""

MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords that hold schemas: by name, in a list, and (`NODES`) one."""
NODES = ("items", "additionalProperties", "additionalItems")
NOTES = (
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
)
"""Keywords that ask for nothing."""
EXACTLY = None
"""At the end of the path of a `oneOf`: that it means one of them, not any."""


# -- which keywords of a schema can be followed --------------------------------------------------------------


def cleaned(node: Any, path: Path, bad: list[Path]) -> Any:
    """A schema without notes and without keywords that are null. What should be a schema and is none becomes
    one that allows anything; its path goes to `bad`."""
    if isinstance(node, bool):
        return node
    if not isinstance(node, dict):
        if node is not None:
            bad.append(path)
        return {}
    made = {}
    for key, value in node.items():
        at = (*path, key)
        if key in NOTES or (value is None and key != "const"):
            continue
        if key in MAPS and isinstance(value, dict):
            value = {name: cleaned(child, (*at, name), bad) for name, child in value.items()}
        elif key in (*LISTS, "items") and isinstance(value, list):
            value = [cleaned(child, (*at, i), bad) for i, child in enumerate(value)]
        elif key in NODES:
            value = cleaned(value, at, bad)
        made[key] = value
    return made


def children(key: str, value: Any) -> list[tuple[Any, Any]]:
    """The schemas that a keyword holds, each with its step in the path."""
    if key in MAPS and isinstance(value, dict):
        return list(value.items())
    if key in (*LISTS, "items") and isinstance(value, list):
        return list(enumerate(value))
    return []


def keywords(node: Any, path: Path = ()) -> Iterator[tuple[int, Path]]:
    """(rank, path) of each keyword. What others need to be understood has a lower rank."""
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        at = (*path, key)
        inner = children(key, value)
        if key == "patternProperties" and inner:
            yield from ((0, (*at, name)) for name, _ in inner)
        elif inner or key in NODES:
            yield 0, at
        else:
            yield {"minProperties": 2, "maxProperties": 2, "$ref": 3, "$dynamicRef": 3}.get(key, 1), at
        if key == "oneOf" and inner:
            yield 4, (*at, EXACTLY)
        for step, child in inner:
            yield from keywords(child, (*at, step))
        if key in NODES and isinstance(value, dict):
            yield from keywords(value, at)


def reduced(node: Any, kept: set[Path], path: Path = ()) -> Any:
    """A schema with those keywords alone that are `kept`."""
    if not isinstance(node, dict):
        return node
    made: dict[str, Any] = {}
    any_of: Any = None
    for key, value in node.items():
        at = (*path, key)
        inner = children(key, value)
        if key == "patternProperties" and inner:
            patterns = {
                name: reduced(child, kept, (*at, name)) for name, child in inner if (*at, name) in kept
            }
            made |= {key: patterns} if patterns else {}
        elif at not in kept:
            continue
        elif isinstance(value, dict) and inner:
            made[key] = {name: reduced(child, kept, (*at, name)) for name, child in inner}
        elif inner:
            built = [reduced(child, kept, (*at, i)) for i, child in inner]
            if key == "oneOf" and (*at, EXACTLY) not in kept:
                any_of = {"anyOf": built}
            else:
                made[key] = built
        else:
            made[key] = reduced(value, kept, at) if key in NODES else value
    if any_of is not None:
        made["allOf"] = [*made.get("allOf", ()), any_of]
    return made


def followed(schema: Any, compiles: Callable[[Any], str]) -> tuple[Any, list[tuple[Path, str]]]:
    """(`schema` with the keywords that can be followed, the others with the reasons).

    `compiles` gives the reason why a schema does not compile, "" if it does. Finding one keyword takes as
    many calls as the logarithm of their number; most are found in small schemas, of one place's keywords.
    """
    ranked = sorted(keywords(schema), key=lambda keyword: keyword[0])
    kept: set[Path] = set()
    left_out: dict[Path, str] = {}

    def keep(paths: Sequence[Path], base: set[Path], compiles_with: Callable[[set[Path]], str]) -> None:
        """Add to `base` those of the paths with which it still compiles, to `left_out` the others."""
        if not paths:
            return
        error = compiles_with(base | {*paths})
        if not error:
            base |= {*paths}
        elif len(paths) == 1:
            left_out[paths[0]] = error
        else:
            half = len(paths) // 2
            keep(paths[:half], base, compiles_with)
            keep(paths[half:], base, compiles_with)

    everything = [path for _, path in ranked]
    if not compiles(reduced(schema, {*everything})):
        return schema, []
    for place, names in _places(ranked).items():
        node = _at(schema, place)
        keep(
            [(*place, name) for name in names],
            set(),
            lambda paths, node=node: compiles({path[-1]: node[path[-1]] for path in paths}),  # type: ignore[misc]
        )
    rest = [path for path in everything if path not in left_out]
    keep(rest, kept, lambda paths: compiles(reduced(schema, paths)))
    in_order = [path for _, path in keywords(schema) if path in left_out]
    return reduced(schema, kept), [(path, left_out[path]) for path in in_order]


def with_definitions(schema: Any) -> Any:
    """A schema that compiles only if this one and each of its definitions does, referred to or not."""
    names = [
        (key, name)
        for key in ("$defs", "definitions")
        if isinstance(schema, dict) and isinstance(schema.get(key), dict)
        for name in schema[key]
    ]
    if not names or "$id" in schema or "id" in schema:  # references may be relative to that
        return schema
    dialect = {"$schema": schema["$schema"]} if "$schema" in schema else {}
    escaped = [(key, quote(name.replace("~", "~0").replace("/", "~1"))) for key, name in names]
    places = ["", *(f"/{key}/{name}" for key, name in escaped)]
    moved = {key: value for key, value in schema.items() if key != "$schema"}
    return {
        **dialect,
        "$defs": {"root": _referring(moved, "#/$defs/root")},
        "anyOf": [{"$ref": "#/$defs/root" + place} for place in places],
    }


def _referring(value: Any, root: str) -> Any:
    """A schema in which references to its root are to another place."""
    if isinstance(value, list):
        return [_referring(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: _referring(inner, root) for key, inner in value.items()}
    to = made.get("$ref")
    if isinstance(to, str) and (to == "#" or to.startswith("#/")):
        made["$ref"] = root + to[1:]
    return made


def _places(ranked: Sequence[tuple[int, Path]]) -> dict[Path, list[str]]:
    """The keywords that mean something by themselves, by the schema that they stand in."""
    places: dict[Path, list[str]] = {}
    for rank, path in ranked:
        if rank == 1:
            places.setdefault(path[:-1], []).append(path[-1])
    # Without the type, also a keyword that means nothing for it would have to be followed.
    return {place: sorted(names, key=lambda name: name != "type") for place, names in places.items()}


def _at(schema: Any, path: Path) -> Any:
    for step in path:
        schema = schema[step]
    return schema


# -- grammars ------------------------------------------------------------------------------------------------


class Bytes:
    """A vocabulary of the bytes, an end, and ids that mean nothing."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __init__(self, num_ids: int) -> None:
        texts = [bytes([byte]) for byte in range(256)]
        self.tokens = [*texts, b"<eos>", *[b""] * (num_ids - 257)]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class Compiler:
    """Answers jobs."""

    def __init__(self, tokens: LLTokenizer, limits: LLParserLimits) -> None:
        self._tokens = tokens
        self._limits = limits

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one line."""
        bad: list[list[Path]] = [[] for _ in job["schemas"]]
        schemas = [cleaned(json.loads(schema["text"]), (), bad[i]) for i, schema in enumerate(job["schemas"])]
        error, grammar = self._whole(job, schemas)
        if not error and not any(bad):
            return {"error": "", "grammar": grammar, "left_out": []}
        left_out: list[tuple[int, Path]] = []
        for i, schema in enumerate(job["schemas"]):
            schemas[i], faults = followed(schemas[i], self._schema_error)
            faults += [(path, "must be an object or a boolean") for path in bad[i]]
            if faults and schema["strict"]:
                return _refused(faults[0][1], i, faults[0][0])
            left_out += [(i, path) for path, _ in faults]
        error, grammar = self._whole(job, schemas)
        if not error:
            return {"error": "", "grammar": grammar, "left_out": left_out}
        for i, schema in enumerate(schemas):
            if alone := self._compiled("json_schema", json.dumps(schema))[0]:
                return _refused(alone, i, ())
        return _refused(error)

    def _whole(self, job: Mapping[str, Any], schemas: Sequence[Any]) -> tuple[str, str]:
        texts = [json.dumps(schema) for schema in schemas]
        return self._compiled(job["format"], re.sub("\0(\\d+)\0", lambda at: texts[int(at[1])], job["text"]))

    def _compiled(self, format: str, text: str) -> tuple[str, str]:
        """(the error, the grammar in the library's form)."""
        try:
            grammar = grammar_from(format, text)  # type: ignore[arg-type]
        except ValueError as error:
            return str(error) or "not a grammar", ""
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # whether there is any reply of this form
        return matcher.get_error(), grammar

    def _schema_error(self, schema: Any) -> str:
        """Why the library cannot follow a schema. It does follow one that nothing fits."""
        grammar = grammar_from("json_schema", json.dumps(with_definitions(schema)))
        error = LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits).get_error()
        return "" if error.startswith("Unsatisfiable") else error


def _refused(error: str, schema: int | None = None, path: Path = ()) -> dict[str, Any]:
    return {"error": error, "schema": schema, "path": path}


def main() -> None:
    first = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (first["memory_bytes"], first["memory_bytes"]))
    tokens = LLTokenizer(TokenizerWrapper(Bytes(max(first["num_ids"], 257))))
    compiler = Compiler(tokens, LLParserLimits(**first["limits"]))
    print(json.dumps({"error": ""}), flush=True)
    for line in sys.stdin:
        signal.alarm(first["seconds"])  # ends this process, should nobody be left to do it
        print(json.dumps(compiler.answer(json.loads(line))), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
