"""The grammar of replies that may call tools, made of a form of calls (`tool_format`).

A token of the grammar that is lazy ends where it first can. So text up to the first marker is one of them,
and so is what begins as a call of a known function without a marker: after them only a valid call fits. The
parser draws the same lines.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from legato.text.grammar import WHITESPACE
from legato.text.grammar_trial import Schema, Source, schema_at
from legato.text.tool_format import BLANKS, FENCED, FRAMELESS, HEAD, MAX_BLANKS, ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """What can be called."""

    name: str
    schema: Schema
    """Of its arguments, which are an object."""


def calls_source(
    format: ToolFormat,
    functions: Sequence[Function],
    *,
    content: Schema | Literal["text"] | None,
    parallel: bool,
    special: Mapping[str, int] | None = None,
) -> Source:
    """A grammar of replies that call.

    `content` is what a reply may be instead: nothing, JSON, or text, which may also come before the first
    call. `special` are the words of the form that are special tokens, with their ids.
    """
    ids, frame, schemas = special or {}, format.frame, [function.schema for function in functions]
    marker = "".join(_word(word, ids) for word in frame.first[:1] if format.marker)
    before = _words(frame.first[1:] if format.marker else frame.first, ids)
    more = f"({_words(frame.next, ids)} call)*" if parallel and frame.next else ""
    rules = [
        f"WS: /({WHITESPACE})?/",
        f"calls: {before} call {more} {_words(frame.close, ids)}",
        f"call: ({_any(f'head{i} rest{i}' for i in range(len(functions)))}) {_words(frame.after, ids)}",
    ]
    if content is None:
        rules.append(f"start: {marker} calls")
    elif isinstance(content, Schema):
        rules += [f"start: content | {marker} calls", f"content: %json {schema_at(len(schemas))}"]
        schemas.append(content)
    else:
        rules += _freely(format, functions, marker)
    for i, function in enumerate(functions):
        rules += [
            f"head{i}: {_words(format.head(function.name))}",
            f'rest{i}: {_words(format.joint)} WS args{i} WS "}}"',
            f"args{i}: %json {schema_at(i)}",
        ]
    return Source(format="lark", text="\n".join(rules), schemas=tuple(schemas))


def _freely(format: ToolFormat, functions: Sequence[Function], marker: str) -> list[str]:
    """Rules for text, calls after text, or a call without a marker."""
    fences = "|".join(_regex(frame.first) for frame in FENCED)
    head = _regex((*HEAD, '"'))
    rules = [
        "TEXT: /(?s:.*)/",
        f"bare[lazy]: /{_regex(FRAMELESS.first)}{head}/",
        f"fenced[lazy]: /({fences}){head}/",
        "begun: bare | fenced",
    ]
    ways = ["TEXT", "begun TEXT"]  # the latter with the name of no known function
    for i, function in enumerate(functions):
        rules.append(f'name{i}[lazy]: /{re.escape(function.name)}"/')
        ways += [f"bare name{i} rest{i}", f"fenced name{i} rest{i} {_words(FENCED[0].after)}"]
    if format.marker:
        # Spelled out, a special token's name looks the same in the text.
        rules.append(f"marked[lazy]: TEXT {json.dumps(format.marker)}")
        ways.append("begun? marked calls")
        if marker.startswith("<"):
            ways.append(f"begun? TEXT? {marker} calls")
    return [f"start: {_any(ways)}", *rules]


def _any(ways: Iterable[str]) -> str:
    return " | ".join(ways)


def _word(word: str, ids: Mapping[str, int]) -> str:
    return f"<[{ids[word]}]>" if word in ids else json.dumps(word)


def _words(words: Iterable[str], ids: Mapping[str, int] | None = None) -> str:
    """Words with blanks before each."""
    return " ".join(f"WS {_word(word, ids or {})}" for word in words)


def _regex(words: Iterable[str]) -> str:
    """The same as an expression, with all the blanks that the parser skips."""
    return "".join(f"[{json.dumps(BLANKS)[1:-1]}]{{0,{MAX_BLANKS}}}{re.escape(word)}" for word in words)
