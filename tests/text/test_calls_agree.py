"""The grammar of replies and the parser of replies agree on what a call is.

Of random replies that the grammar lets in, what is told as a call fits its schema, and what is told as
content fits the format.
"""

import json
import random
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import jsonschema
import pytest
from grammar_rig import EOS, compiled, ids_of

from legato.text.grammar import Grammar, Grammars
from legato.text.grammar_trial import Schema
from legato.text.tool_call_grammar import Function, calls_source
from legato.text.tool_call_parser import Arguments, Call, Content, Piece, ToolCallParser
from legato.text.tool_format import FORMATS, ToolFormat

MOST = 260
"""Tokens after which a reply is cut."""
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "note": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get.weather": CITY,
    "get": {"type": "object", "maxProperties": 0, "additionalProperties": False},
    "any": {"type": "object"},
}
CONTENTS: dict[str, dict[str, Any] | Literal["text"] | None] = {
    "text": "text",
    "nothing": None,
    "any object": {"type": "object"},
    "any JSON": {},
    "looks like a call": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "arguments": {"type": "object"},
            "parameters": {"type": "object"},
        },
        "required": ["name"],
    },
    "a city": CITY,
    "a list": {"type": "array", "items": {"type": "string"}},
    "a text": {"type": "string"},
}


class Replies:
    """Random replies of one grammar."""

    def __init__(
        self, grammars: Grammars, format: ToolFormat, content: dict[str, Any] | Literal["text"] | None
    ) -> None:
        self.format, self.content = format, content
        functions = [
            Function(name=name, schema=grammars.schema(schema, strict=True))
            for name, schema in FUNCTIONS.items()
        ]
        form: Schema | Literal["text"] | None = None
        if content is not None:
            form = "text" if content == "text" else grammars.schema(content, strict=True)
        self._mode: Literal["text", "json"] | None = "json" if isinstance(form, Schema) else form

        def grammar_with(form: Schema | Literal["text"] | None) -> Grammar:
            return compiled(grammars, calls_source(format, functions, content=form, parallel=True))

        self._grammar = grammar_with(form)
        self._calls_alone = grammar_with(None) if self._mode == "json" and not format.marker else None

    def parser(self) -> ToolCallParser:
        may_call = None if self._calls_alone is None else self._calls_alone.text_matcher().push
        return ToolCallParser(self.format, FUNCTIONS, content=self._mode, may_call=may_call)

    def takes(self, text: str) -> bool:
        """Whether it may be a whole reply."""
        fits = self._grammar.text_matcher().push(text)
        return fits and EOS in ids_of(self._grammar.matcher().mask(text.encode()))

    def draw(self, rng: random.Random) -> tuple[str, bool]:
        """(a reply, whether it is complete). It follows a text as far as it may, and wanders off at times."""
        wanted, matcher, made = target(self.format, rng).encode(), self._grammar.matcher(), b""
        while len(made) < MOST:
            allowed = ids_of(matcher.mask(made))
            going_on = [id for id in allowed if id != EOS]
            if EOS in allowed and (not wanted or not going_on or rng.random() < 0.02):
                return made.decode(), True
            if rng.random() < 0.02:
                wanted = wanted[rng.randrange(4) :]
            while wanted and wanted[0] not in going_on and rng.random() < 0.7:
                wanted = wanted[1:]
            if wanted and wanted[0] in going_on:
                made, wanted = made + wanted[:1], wanted[1:]
            else:
                closing = [id for id in going_on if id in b'"}]>`']
                usual = [id for id in going_on if id < 127 and chr(id).isalnum()]
                chosen = closing if closing and rng.random() < 0.6 else usual or going_on
                made += bytes([rng.choice(chosen)])
        return made.decode(errors="ignore"), False


def target(format: ToolFormat, rng: random.Random) -> str:
    """Something that is a call, or resembles one."""
    name = rng.choice([*FUNCTIONS, "other"])
    arguments: Any = rng.choice([{}, {"city": "Paris"}, {"city": "Bonn"}, {"city": "Rome", "note": "}<>"}])
    key = rng.choice([format.arguments, "arguments", "parameters", "args"])
    bare = json.dumps({"name": name, key: arguments})
    marked = format.written([(name, arguments)] * rng.choice([1, 1, 2]))
    text = rng.choice(
        [
            marked,
            marked,
            bare,
            f"```json\n{bare}\n```",
            f"```\n{bare}",
            f"{bare}\n```",
            f"So: {marked} and {bare}",
            f"So: {bare}",
            json.dumps({"a": marked, "name": "get"}),
            json.dumps([marked, bare]),
            json.dumps(marked),
            json.dumps(arguments),
            "I say [TOOL_CALLS] and <tool_call>",
        ]
    )
    if rng.random() < 0.4:  # blanks of all kinds, in places where they may be and where not
        at = rng.choice([0, *(match.end() for match in re.finditer(r'[{:,`">\n]', text))])
        text = (
            text[:at]
            + rng.choice([" ", "\n", "\t", "\r\n", "\n" * 30, " " * 63, " " * 64, " " * 65])
            + text[at:]
        )
    return text


def pieces_of(parser: ToolCallParser, text: str, cuts: Sequence[int]) -> list[Piece]:
    """Everything told, neighbours of a kind joined."""
    edges = [0, *sorted(cuts), len(text)]
    found = [piece for a, b in pairwise(edges) for piece in parser.push(text[a:b])]
    joined: list[Piece] = []
    for piece in [*found, *parser.flush()]:
        last = joined[-1] if joined else None
        if isinstance(piece, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Arguments) and isinstance(last, Arguments):
            joined[-1] = Arguments(last.text + piece.text)
        else:
            joined.append(piece)
    return joined


def check(replies: Replies, text: str, complete: bool, pieces: Sequence[Piece]) -> None:
    calls: list[tuple[str, str]] = []
    content = ""
    for piece in pieces:
        if isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, Call):
            calls.append((piece.name, ""))
        else:
            calls[-1] = calls[-1][0], calls[-1][1] + piece.text
    assert text.startswith(content), "content comes before all calls, and is the text as it is"
    for name, arguments in calls if complete else calls[:-1]:
        jsonschema.validate(json.loads(arguments), FUNCTIONS[name])
    if replies.content is None:
        assert not content
        assert calls or not complete
    elif replies.content == "text":
        marker = replies.format.marker
        assert not marker or marker not in content
        assert calls or content == text or not complete
    elif calls:
        assert not content
    elif complete:
        assert content == text
        jsonschema.validate(json.loads(content), replies.content)


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_what_the_grammar_lets_in_the_parser_takes_for_the_same(
    grammars: Grammars, format: ToolFormat, content: dict[str, Any] | Literal["text"] | None
) -> None:
    replies, called, said = Replies(grammars, format, content), 0, 0
    for seed in range(60):
        rng = random.Random(seed)
        text, complete = replies.draw(rng)
        whole = pieces_of(replies.parser(), text, [])
        check(replies, text, complete, whole)
        one_by_one = pieces_of(replies.parser(), text, range(1, len(text)))
        assert one_by_one == whole, text
        for _ in range(3):
            cuts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(6))]
            assert pieces_of(replies.parser(), text, cuts) == whole, text
        for end in rng.sample(range(len(text)), min(len(text), 5)):  # cut by max_tokens
            check(replies, text[:end], False, pieces_of(replies.parser(), text[:end], []))
        called += any(isinstance(piece, Call) for piece in whole)
        said += any(isinstance(piece, Content) for piece in whole)
    assert called, "a test that saw no call"
    assert said or content is None, "a test that saw no content"


FRAMES = ["{}", "```json\n{}\n```", "```\n{}\n```", "{}\n```", "```python\n{}\n```", "So {}", "``` json{}```"]
PLACES = ["", "{", '{"name"', '{"name":', '{"name": "any"', '{"name": "get.weather"', "```json", "```"]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_in_text_a_call_without_a_marker_is_one_whatever_blanks_and_fences_are_around(
    grammars: Grammars, format: ToolFormat
) -> None:
    """Each text that the grammar lets in is checked; those that would be a wrong call are not let in."""
    replies = Replies(grammars, format, "text")
    counts = {"refused": 0, "call": 0, "content": 0}
    for frame in FRAMES:
        for name, arguments in (("get.weather", {"city": "Bonn"}), ("any", {"city": "Bonn"}), ("no", {})):
            written = frame.format(json.dumps({"name": name, format.arguments: arguments}))
            for place in PLACES:
                for blanks in ("", "\t", "\r\n", "\n" * 30, " " * 63, " " * 64, " " * 65, "\n\t" * 40):
                    at = written.find(place) + len(place)
                    text = written[:at] + blanks + written[at:]
                    if not replies.takes(text):
                        counts["refused"] += 1
                        continue
                    pieces = pieces_of(replies.parser(), text, [])
                    check(replies, text, True, pieces)
                    counts["call" if Call("any") in pieces else "content"] += 1
    assert min(counts.values()) > 50, counts


def test_a_fence_that_nobody_opened_cannot_be_closed(grammars: Grammars) -> None:
    for format in FORMATS.values():
        replies = Replies(grammars, format, "text")
        call = json.dumps({"name": "get", format.arguments: {}})
        assert [replies.takes(text) for text in (call, f"```{call}```", f"{call}\n```")] == [
            True,
            True,
            False,
        ]
