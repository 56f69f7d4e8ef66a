"""Calls of tools: recognized forms, grammars that allow valid ones alone, parsers that find them again."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
from grammar_rig import compiled, ids_of, num_taken, takes
from hypothesis import given
from hypothesis import strategies as st
from tiny_vocabularies import merged_metadata

from legato.errors import RequestError
from legato.text.chat import BUILTIN_TEMPLATES, ChatTemplate, Message
from legato.text.detokenizer import Detokenizer
from legato.text.grammar import Grammar, Grammars
from legato.text.grammar_trial import Schema
from legato.text.tokenizer import tokenizer_from_gguf
from legato.text.tool_call_grammar import Function, calls_source
from legato.text.tool_call_parser import Arguments, Call, Content, Piece, ToolCallParser
from legato.text.tool_calls import ToolUse, in_plain_words, tool_use
from legato.text.tool_format import FORMATS, HERMES, ToolFormat

LLAMA, MISTRAL = FORMATS["llama3_json"], FORMATS["mistral"]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}{% endfor %}{{ tools | tojson }}"
TEMPLATES = {
    "hermes": CALLS + '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}' + END,
    "llama3_json": CALLS + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}' + END,
    "mistral": CALLS
    + "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    + '[TOOL_CALLS][{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}]'
    + END,
}
UNKNOWN_FORMS = {
    "XML": CALLS + "<tool_call>\n<function={{ f.name }}>" + END,
    "Mistral of another year": CALLS + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}" + END,
    "a template that refuses": "{{ raise_exception('no') }}{{ tools }}",
    "no tools": "{% for m in messages %}{{ m.content }}{% endfor %}",
    **BUILTIN_TEMPLATES,
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="", eos_token="")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_the_one_in_which_the_template_writes_a_call(name: str) -> None:
    assert tool_use(template(TEMPLATES[name])) == ToolUse(FORMATS[name], True)


@pytest.mark.parametrize("source", UNKNOWN_FORMS.values(), ids=UNKNOWN_FORMS.keys())
def test_a_model_whose_form_is_not_known_is_told_of_hermes_by_us(source: str) -> None:
    use = tool_use(template(source))
    assert use == ToolUse(HERMES, False)
    assert str(use) == "hermes, explained by the server"


@pytest.mark.parametrize("source", [TEMPLATES["hermes"], UNKNOWN_FORMS["no tools"]])
def test_a_form_that_is_asked_for_is_used(source: str) -> None:
    assert tool_use(template(source), "mistral").format is MISTRAL


# -- grammars ------------------------------------------------------------------------------------------------


def grammar_of(
    grammars: Grammars,
    format: ToolFormat,
    *,
    content: Schema | Literal["text"] | None = None,
    parallel: bool = True,
) -> Grammar:
    functions = [
        Function(name="get.weather", schema=grammars.schema(WEATHER, strict=True)),
        Function(
            name="stop-it", schema=grammars.schema({"type": "object", "maxProperties": 0}, strict=False)
        ),
    ]
    return compiled(grammars, calls_source(format, functions, content=content, parallel=parallel))


PARIS: tuple[str, object] = ("get.weather", {"city": 'P"a}ris 🦊', "days": 3})
STOP: tuple[str, object] = ("stop-it", {})
MARKED = [HERMES, MISTRAL]
ALL = [*MARKED, LLAMA]


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
class TestGrammar:
    def test_valid_calls_may_be_written_and_the_reply_then_ends(
        self, grammars: Grammars, format: ToolFormat
    ) -> None:
        contents: list[Schema | Literal["text"] | None] = [
            None,
            "text",
            grammars.schema(WEATHER, strict=True),
        ]
        for content in contents:
            grammar = grammar_of(grammars, format, content=content)
            assert takes(grammar, format.written([PARIS]))
            assert takes(grammar, format.written([STOP, PARIS])) is (format.between is not None)
            assert not takes(grammar_of(grammars, format, parallel=False), format.written([STOP, PARIS]))

    def test_blanks_may_stand_where_json_has_them_or_not(
        self, grammars: Grammars, format: ToolFormat
    ) -> None:
        written = format.written([PARIS])
        grammar = grammar_of(grammars, format)
        assert takes(grammar, written.replace('": ', '":').replace(", ", ","))
        assert takes(grammar, written.replace('{"name"', '{\n    "name"'))

    def test_an_unknown_function_or_wrong_arguments_cannot_be_written(
        self, grammars: Grammars, format: ToolFormat
    ) -> None:
        grammar = grammar_of(grammars, format)
        for name, arguments in (
            ("get_weather", {"city": "a"}),
            ("get.weather", {"town": "a"}),
            ("get.weather", {"city": 5}),
            ("get.weather", {"city": "a", "days": 10}),
            ("stop-it", {"a": 1}),
        ):
            assert not takes(grammar, format.written([(name, arguments)]))

    def test_where_a_call_is_required_nothing_else_is_possible(
        self, grammars: Grammars, format: ToolFormat
    ) -> None:
        grammar = grammar_of(grammars, format)
        assert num_taken(grammar, "Hello") == 0
        assert not takes(grammar, "")

    def test_text_is_free_where_nothing_is_required(self, grammars: Grammars, format: ToolFormat) -> None:
        grammar = grammar_of(grammars, format, content="text")
        for text in ("", "Hello <tool> [1] {}", "ö\n🦊", '{"name": "somebody"}', "The form is {"):
            assert takes(grammar, text), text

    def test_content_is_of_its_form_or_a_call(self, grammars: Grammars, format: ToolFormat) -> None:
        grammar = grammar_of(grammars, format, content=grammars.schema(WEATHER, strict=True))
        assert takes(grammar, '{"city": "a"}')
        assert not takes(grammar, "Hello")


@pytest.mark.parametrize("format", MARKED, ids=lambda format: format.name)
def test_after_a_marker_in_text_only_a_valid_call_may_come(grammars: Grammars, format: ToolFormat) -> None:
    grammar = grammar_of(grammars, format, content="text")
    assert takes(grammar, "Let me see.\n" + format.written([PARIS]))
    begun = "Let me see. " + format.marker
    assert num_taken(grammar, begun + " hello") <= len(begun) + 1


BARE = {"bare": "{}", "in a fence": "```\n{}\n```", "in a fence of JSON": "```json\n{}\n```"}


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
@pytest.mark.parametrize("frame", BARE.values(), ids=BARE.keys())
def test_what_begins_as_a_call_of_a_known_function_goes_on_as_one(
    grammars: Grammars, format: ToolFormat, frame: str
) -> None:
    grammar = grammar_of(grammars, format, content="text")
    assert takes(grammar, frame.format(LLAMA.written([PARIS]).replace("parameters", format.arguments)))
    begun = frame.partition("}")[0] + '"name": "get.weather"'
    assert num_taken(grammar, begun + " hello") == len(begun) + 1
    assert takes(grammar, "As in " + begun + " hello")
    assert takes(grammar, frame.format('{"name": "weather", "x": 1}'))


def test_a_marker_that_is_a_special_token_comes_as_that_token(grammars: Grammars) -> None:
    """As Mistral's [TOOL_CALLS]: its name spelled out is text, and no call follows it."""
    tokenizer = tokenizer_from_gguf(merged_metadata())
    marker_id = tokenizer.special_id("<|im_start|>")
    assert marker_id is not None
    assert tokenizer.special_id("hello") is None
    special = Grammars(tokenizer, tokenizer.vocab_size)
    format = replace(MISTRAL, marker="<|im_start|>")
    functions = [Function(name="stop-it", schema=grammars.schema({"type": "object"}, strict=True))]

    def allowed(content: Literal["text"] | None, text: str) -> set[int]:
        source = calls_source(
            format, functions, content=content, parallel=True, special={"<|im_start|>": marker_id}
        )
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        return set(ids_of(compiled(special, source).matcher().mask(ids)))

    assert allowed(None, "") == {marker_id}
    assert {marker_id, *tokenizer.eos_ids} < allowed("text", "hello w")
    opening = tokenizer.encode("[", add_special_tokens=False)[0]
    assert opening in allowed("text", "hello w<|im_start|>")
    assert not allowed("text", "hello w<|im_start|>") & tokenizer.eos_ids
    assert not allowed("text", '<|im_start|>[{"name": "') & {marker_id, *tokenizer.eos_ids}
    shown = Detokenizer(tokenizer, shown={marker_id})
    assert "".join(map(shown.push, [marker_id, opening])) == "<|im_start|>["
    hidden = Detokenizer(tokenizer)
    assert "".join(map(hidden.push, [marker_id, opening])) == "["


def test_every_word_of_the_form_that_is_a_special_token_comes_as_that_token() -> None:
    tokenizer = tokenizer_from_gguf(merged_metadata())
    marker_id = tokenizer.special_id("<|im_start|>")
    assert marker_id is not None
    special = Grammars(tokenizer, tokenizer.vocab_size)
    format = replace(HERMES, marker="<|im_start|>", before="", between="<|im_start|>", after="")
    functions = [Function(name="stop-it", schema=special.schema({"type": "object"}, strict=True))]
    source = calls_source(format, functions, content=None, parallel=True, special={"<|im_start|>": marker_id})
    call = '<|im_start|>{"name": "stop-it", "arguments": {}}'
    ids = tokenizer.encode(call, add_special_tokens=False, parse_special=True)
    assert marker_id in ids_of(compiled(special, source).matcher().mask(ids))


# -- parsing -------------------------------------------------------------------------------------------------


def pieces_of(format: ToolFormat, text: str, cuts: Sequence[int] = ()) -> list[Piece]:
    """Everything found, neighbours of a kind joined."""
    parser = ToolCallParser(format, {"get.weather", "stop-it"})
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
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


def found(*calls: tuple[str, object]) -> list[Piece]:
    pieces: list[Piece] = []
    for name, arguments in calls:
        pieces += [Call(name), Arguments(json.dumps(arguments, ensure_ascii=False))]
    return pieces


CUTS = st.lists(st.integers(0, 500), max_size=12)


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
@given(cuts=CUTS)
def test_what_is_written_is_found_however_it_is_cut(format: ToolFormat, cuts: list[int]) -> None:
    assert pieces_of(format, format.written([PARIS]), cuts) == found(PARIS)
    if format.between is not None:
        assert pieces_of(format, format.written([PARIS, STOP, PARIS]), cuts) == found(PARIS, STOP, PARIS)


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
@pytest.mark.parametrize("frame", BARE.values(), ids=BARE.keys())
@given(cuts=CUTS)
def test_a_reply_that_is_one_call_needs_no_marker(format: ToolFormat, frame: str, cuts: list[int]) -> None:
    text = frame.format(LLAMA.written([PARIS]).replace("parameters", format.arguments))
    assert pieces_of(format, text, cuts) == found(PARIS)
    assert pieces_of(format, text + "\nThat is it.", cuts) == [*found(PARIS), Content("That is it.")]


@pytest.mark.parametrize("format", MARKED, ids=lambda format: format.name)
@given(cuts=CUTS)
def test_text_before_calls_is_content(format: ToolFormat, cuts: list[int]) -> None:
    text = "I look <tool [TOOL {up}.\n"
    assert pieces_of(format, text + format.written([STOP]), cuts) == [Content(text), *found(STOP)]


@pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
@pytest.mark.parametrize("start", ["", "<tool_call>", "[TOOL_CALLS]", '{"name"'])
def test_a_reply_of_blanks_takes_no_longer_for_each(format: ToolFormat, start: str) -> None:
    parser = ToolCallParser(format, {"f"})
    text = "".join(piece.text for piece in parser.push(start) if isinstance(piece, Content))
    began = time.process_time()
    for _ in range(3000):
        text += "".join(piece.text for piece in parser.push("\n" * 16) if isinstance(piece, Content))
    assert time.process_time() - began < 0.5
    assert text.endswith("\n" * 40_000)


NO_CALLS = {
    "text": (HERMES, "Hello <tool_cal"),
    "not JSON": (HERMES, "Look: <tool_call>\nhello</tool_call> bye"),
    "an unknown function": (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
    "other keys": (HERMES, '<tool_call>{"name": "stop-it", "params": {}}</tool_call>'),
    "arguments that are no object": (HERMES, '<tool_call>{"name": "stop-it", "arguments": 5}</tool_call>'),
    "half a marker": (HERMES, "x <tool_cal"),
    "half a name": (LLAMA, '{"name": "stop-'),
    "a name that goes on": (LLAMA, '{"name": "stop-it-now", "parameters": {'),
    "another language": (HERMES, "```python\nprint()\n```"),
    "JSON of another kind": (HERMES, '```json\n{"city": "Paris"}\n```'),
    "two fences": (HERMES, "``````"),
    "JSON": (LLAMA, '{"name": "rm", "parameters": {}}'),
    "text and JSON": (LLAMA, 'So: {"name": "stop-it", "parameters": {}}'),
    "a list": (MISTRAL, '[TOOL_CALLS] {"name": "stop-it"}'),
    "nothing": (LLAMA, ""),
}


@pytest.mark.parametrize(("format", "text"), NO_CALLS.values(), ids=NO_CALLS.keys())
@given(cuts=CUTS)
def test_what_is_no_call_is_content_to_the_letter(format: ToolFormat, text: str, cuts: list[int]) -> None:
    assert pieces_of(format, text, cuts) == ([Content(text)] if text else [])


@given(cuts=CUTS)
def test_a_call_that_is_cut_off_keeps_its_arguments_so_far(cuts: list[int]) -> None:
    text = HERMES.written([PARIS])
    assert pieces_of(HERMES, text[:-40], cuts)[0] == Call("get.weather")
    assert pieces_of(HERMES, text[: text.index("ris")], cuts)[1:] == [Arguments('{"city": "P\\"a}')]


CUT_CALLS = {
    "after the marker": (HERMES, "x <tool_call>", [Content("x ")]),
    "in blanks": (HERMES, "\n\n<tool_call>\n\n\n", [Content("\n\n")]),
    "in the head": (HERMES, 'x <tool_call>{"name": "stop-it", "argum', [Content("x ")]),
    "in the name": (MISTRAL, '[TOOL_CALLS][{"name": "st', []),
    "after the name": (LLAMA, '{"name": "stop-it"', []),
    "in a fence": (HERMES, '```json\n{"name": "stop-it", "arguments"', []),
    "in the head of another": (HERMES, HERMES.written([STOP]) + '\n<tool_call>\n{"na', found(STOP)),
    "before the end of a fence": (LLAMA, '```\n{"name": "stop-it", "parameters": {}}\n``', found(STOP)),
    "before the end of the form": (MISTRAL, MISTRAL.written([STOP])[:-1], found(STOP)),
}


@pytest.mark.parametrize(("format", "text", "expected"), CUT_CALLS.values(), ids=CUT_CALLS.keys())
@given(cuts=CUTS)
def test_of_a_call_that_is_cut_before_its_arguments_nothing_is_shown(
    format: ToolFormat, text: str, expected: list[Piece], cuts: list[int]
) -> None:
    assert pieces_of(format, text, cuts) == expected


@given(cuts=CUTS)
def test_a_second_call_that_is_none_is_content(cuts: list[int]) -> None:
    pieces = pieces_of(HERMES, HERMES.written([STOP]) + "\n<tool_call>{}</tool_call>", cuts)
    assert pieces == [*found(STOP), Content("<tool_call>{}</tool_call>")]


# -- our own words -------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "get.weather", "parameters": WEATHER}}
USER: Message = {"role": "user", "content": "Weather?"}
CALLED: Message = {
    "role": "assistant",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "get.weather", "arguments": '{"city": "Paris"}'}}
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]}


def test_our_words_name_every_tool_and_show_the_form() -> None:
    system, user = in_plain_words([USER], [TOOL], HERMES, system=True)
    assert (system["role"], user) == ("system", USER)
    assert json.dumps(TOOL["function"]) in str(system["content"])
    assert "<tool_call>\n{" in str(system["content"])


def test_calls_and_results_become_text_that_the_parser_would_find() -> None:
    conversation = in_plain_words([USER, CALLED, RESULT, RESULT, USER], [], HERMES, system=True)
    assert [message["role"] for message in conversation] == ["user", "assistant", "user"]
    assert pieces_of(HERMES, str(conversation[1]["content"])) == found(("get.weather", {"city": "Paris"}))
    assert str(conversation[2]["content"]).count("<tool_response>\nsunny\n</tool_response>") == 2
    assert str(conversation[2]["content"]).endswith("Weather?")


def test_the_systems_message_keeps_its_text_behind_ours() -> None:
    first, *_ = in_plain_words(
        [{"role": "developer", "content": "Be brief."}, USER], [TOOL], HERMES, system=True
    )
    assert first["role"] == "system"
    assert str(first["content"]).endswith("\n\nBe brief.")


def test_without_a_place_for_the_system_the_user_begins_with_it() -> None:
    (only,) = in_plain_words([USER], [TOOL], HERMES, system=False)
    assert only["role"] == "user"
    assert str(only["content"]).endswith("\n\nWeather?")


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_our_words_go_through_every_built_in_template(name: str) -> None:
    built_in = template(BUILTIN_TEMPLATES[name])
    conversation = [USER, CALLED, RESULT, USER]
    with pytest.raises(RequestError):
        built_in.render(conversation)
    plain = in_plain_words(conversation, [TOOL], HERMES, system=built_in.takes_system)
    text = built_in.render(plain)
    assert text.index("get.weather") < text.index("Weather?") < text.index("sunny")


@pytest.mark.parametrize(
    ("source", "takes_system"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("{{ messages[-1].content }}", False),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}", False),
    ],
)
def test_a_template_without_a_place_for_the_system_is_known(source: str, takes_system: bool) -> None:
    assert template(source).takes_system is takes_system
