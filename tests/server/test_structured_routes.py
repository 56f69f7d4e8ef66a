"""Structured output over HTTP: every field that asks for it is obeyed, or refused by name. Case J-07."""

import asyncio
import json
import re
import time
from typing import Any

import httpx
import jsonschema
import pytest
from server_rig import (
    BOS,
    EOS,
    VOCAB,
    ScriptedRunner,
    ask,
    build_service,
    events_of,
    in_process,
    plain_runner,
    spelled,
)
from tool_rig import PERSON, USER

from legato.text.fake import FakeTokenizer
from legato.text.grammar import GrammarLimits, Grammars
from legato.text.grammar_trial import WorkLimits

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GBNF = 'root ::= "a" [0-9]'
ENDLESS = "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(1, 40))


def asked(path: str, **fields: object) -> httpx.Response:
    start: dict[str, object] = {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}
    return ask(path, {**start, "max_tokens": 300, **fields}, service=build_service(plain_runner()))


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert isinstance(text, str)
    return text


def json_schema(schema: object, **more: object) -> dict[str, object]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}
    }


FIELDS: dict[str, tuple[dict[str, object], str]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
    "json_schema": (json_schema(PERSON, strict=True), r'\{.*"age".*\}'),
    "guided_json": ({"guided_json": PERSON}, r'\{.*"age".*\}'),
    "guided_json as text": ({"guided_json": json.dumps(PERSON)}, r'\{.*"age".*\}'),
    "guided_regex": ({"guided_regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
    "guided_choice": ({"guided_choice": ["größer", "kleiner"]}, "größer|kleiner"),
    "guided_grammar": ({"guided_grammar": GBNF}, "a[0-9]"),
    "structured_outputs.json": ({"structured_outputs": {"json": PERSON}}, r'\{.*"age".*\}'),
    "structured_outputs.json_object": ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "x+y"}}, "x+y"),
    "structured_outputs.choice": ({"structured_outputs": {"choice": ["b", "c"]}}, "b|c"),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": GBNF}}, "a[0-9]"),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "form"), FIELDS.values(), ids=FIELDS.keys())
def test_the_reply_has_the_form_that_a_field_asks_for(
    path: str, fields: dict[str, object], form: str
) -> None:
    text = text_of(asked(path, **fields))
    assert re.fullmatch(form, text, re.DOTALL)
    if "age" in form:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_gives_the_text_of_the_whole_answer(path: str) -> None:
    whole = text_of(asked(path, guided_json=PERSON))
    events = events_of(asked(path, guided_json=PERSON, stream=True).text)
    choices = [event["choices"][0] for event in events]
    parts = [choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices]
    assert "".join(parts) == whole
    assert choices[-1]["finish_reason"] == "stop"


def test_asking_for_text_asks_for_nothing() -> None:
    for path in (COMPLETIONS, CHAT):
        free = asked(path, max_tokens=8).json()["choices"]
        assert asked(path, max_tokens=8, response_format={"type": "text"}).json()["choices"] == free
        assert asked(path, max_tokens=8, guided_regex=None, structured_outputs=None).json()["choices"] == free


def test_a_json_schema_without_a_schema_is_any_json() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x"}}
    (choice,) = asked(COMPLETIONS, max_tokens=8, response_format=format).json()["choices"]
    assert choice["text"][0] in '"{[-0123456789tfn'


def test_every_one_of_n_replies_and_of_several_prompts_has_the_form() -> None:
    answer = asked(COMPLETIONS, prompt=["hi", "there", "you"], n=4, guided_regex="[a-z]{3}[0-9]{4}").json()
    assert len(answer["choices"]) == 12
    assert all(re.fullmatch("[a-z]{3}[0-9]{4}", choice["text"]) for choice in answer["choices"])


def test_a_reply_cut_by_max_tokens_says_so() -> None:
    (choice,) = asked(COMPLETIONS, guided_regex="[a-z]{30}", max_tokens=5).json()["choices"]
    assert (len(choice["text"]), choice["finish_reason"]) == (5, "length")


class TestEnd:
    """Where the form is complete the reply ends, whatever else was asked for."""

    @pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}, {"min_tokens": 100}])
    def test_a_complete_form_ends_the_reply(self, fields: dict[str, object]) -> None:
        assert text_of(asked(COMPLETIONS, guided_choice=["abc"], **fields)) == "abc"

    @pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 20}])
    def test_it_does_not_end_while_it_may_go_on(self, fields: dict[str, object]) -> None:
        """After each number of letters the form is complete, and might go on."""
        (choice,) = asked(COMPLETIONS, guided_regex="a*", max_tokens=20, **fields).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("a" * 20, "length")

    def test_a_stop_string_and_a_stop_token_of_the_client_end_it_early(self) -> None:
        for fields in ({}, {"ignore_eos": True}, {"min_tokens": 4}):
            answer = asked(COMPLETIONS, guided_choice=["abcdef"], stop="de", **fields).json()["choices"][0]
            assert (answer["text"], answer["stop_reason"]) == ("abc", "de")
        answer = asked(COMPLETIONS, guided_choice=["abcdef"], stop="de", min_tokens=5).json()["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == ("abcdef", "stop")
        answer = asked(COMPLETIONS, guided_choice=["abcdef"], stop_token_ids=[ord("c")]).json()["choices"][0]
        assert (answer["text"], answer["stop_reason"]) == ("ab", ord("c"))

    @pytest.mark.parametrize("fields", [{"allowed_token_ids": [97]}, {"bad_words": ["a"]}])
    def test_other_rules_for_what_may_come_are_refused(self, fields: dict[str, object]) -> None:
        """Together they could leave nothing, and a row without a token fails the whole step."""
        response = asked(COMPLETIONS, guided_choice=["ab"], **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))

    def test_a_bias_against_all_that_may_come_does_not_win(self) -> None:
        assert text_of(asked(COMPLETIONS, guided_choice=["ab"], logit_bias={"97": -100, "98": -100})) == "ab"

    def test_ignore_eos_with_stop_tokens_of_the_client_is_refused(self) -> None:
        response = asked(COMPLETIONS, guided_choice=["a"], ignore_eos=True, stop_token_ids=[5])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "ignore_eos")


def test_log_probabilities_are_there_for_constrained_tokens() -> None:
    (choice,) = asked(COMPLETIONS, guided_choice=["ab"], logprobs=1).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "b", "<eos>"]


@pytest.mark.parametrize("stream", [False, True])
def test_n_03_what_a_response_format_has_that_cannot_be_followed_is_left_out_and_told(stream: bool) -> None:
    schema = {**PERSON, "if": {}, "properties": {**PERSON["properties"], "x": {"pattern": "(?=a)"}}}
    for path in (CHAT, COMPLETIONS):
        response = asked(path, **json_schema(schema), max_tokens=300, stream=stream)
        assert response.status_code == 200, response.text
        place = "response_format.json_schema.schema"
        told = f"schema keywords left out: {place}.properties.x.pattern, {place}.if"
        assert response.headers["X-Legato-Notice"] == told
        if not stream:
            made = json.loads(text_of(response))
            jsonschema.validate({key: made[key] for key in PERSON["required"]}, PERSON)
        refused = asked(path, **json_schema(schema, strict=True), stream=stream)
        assert refused.status_code == 400
        assert f"{place}.properties.x.pattern: look-around" in refused.json()["error"]["message"]


DEEP: dict[str, object] = {"type": "integer"}
for _ in range(100):
    DEEP = {"type": "array", "items": DEEP}

REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "two at once": (
        "guided_regex",
        {"guided_regex": "a", "guided_json": {}},
        "not together with guided_json",
    ),
    "two kinds in one": (
        "structured_outputs",
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "one of",
    ),
    "no kind": ("structured_outputs", {"structured_outputs": {}}, "one of"),
    "a kind of null": ("structured_outputs", {"structured_outputs": {"json": None}}, "one of"),
    "structural tags": (
        "structured_outputs.structural_tag",
        {"structured_outputs": {"structural_tag": "{}"}},
        "not supported",
    ),
    "another kind": ("structured_outputs.yaml", {"structured_outputs": {"yaml": "a"}}, "unknown field"),
    "blanks of the client's": (
        "guided_whitespace_pattern",
        {"guided_json": {}, "guided_whitespace_pattern": " "},
        "not supported",
    ),
    "another backend": ("guided_decoding_backend", {"guided_decoding_backend": "x"}, "not supported"),
    "unknown format": ("response_format.type", {"response_format": {"type": "yaml"}}, "json_schema"),
    "json_schema without one": (
        "response_format",
        {"response_format": {"type": "json_schema"}},
        "json_schema",
    ),
    "a schema without json_schema": (
        "response_format",
        {"response_format": {"type": "json_object", "json_schema": {"name": "x"}}},
        "json_schema",
    ),
    "a schema without a name": (
        "response_format.json_schema.name",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "required",
    ),
    "a schema that is none": (
        "response_format.json_schema.schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
        "",
    ),
    "strict, with an unknown keyword": (
        "response_format.json_schema.schema",
        json_schema({"type": "array", "uniqueItems": True}, strict=True),
        "uniqueItems",
    ),
    "deep": ("response_format.json_schema.schema", json_schema(DEEP), "nested 101 deep, at most 64"),
    "guided_json with an unknown keyword": (
        "guided_json",
        {"guided_json": {"not": {"type": "null"}}},
        '["not"]',
    ),
    "guided_json that is no JSON": ("guided_json", {"guided_json": "{"}, "not valid JSON"),
    "guided_json that is no object": ("guided_json", {"guided_json": "[]"}, "must be a JSON object"),
    "guided_json that is a number": ("guided_json", {"guided_json": 5}, "object"),
    "a schema of 1 MB": (
        "guided_json",
        {"guided_json": {"enum": ["x" * 100 + str(i) for i in range(10_000)]}},
        "at most 262144 possible",
    ),
    "a schema that refers to itself": ("guided_json", {"guided_json": {"$ref": "#"}}, "no text"),
    "invalid regex": ("guided_regex", {"guided_regex": "(a"}, "unclosed group"),
    "a regex that is no text": ("guided_regex", {"guided_regex": 5}, "string"),
    "a lone surrogate": ("guided_regex", {"guided_regex": "\ud800"}, "surrogate"),
    "no choices": ("guided_choice", {"guided_choice": []}, "at least 1"),
    "too many choices": ("guided_choice", {"guided_choice": ["a"] * 10_001}, "10000"),
    "a choice that is no text": ("guided_choice[1]", {"guided_choice": ["a", 1]}, "string"),
    "a grammar without a root": ("guided_grammar", {"guided_grammar": 'a ::= "b"'}, "root"),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("param", "fields", "hint"), REFUSED.values(), ids=REFUSED.keys())
def test_j_07_what_cannot_be_is_refused_by_name(
    path: str, param: str, fields: dict[str, object], hint: str
) -> None:
    for streamed in (False, True):
        response = asked(path, stream=streamed, **fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert hint in error["message"]
        assert len(error["message"]) < 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_holds_while_a_grammar_is_compiled(stream: bool) -> None:
    grammars = Grammars(FakeTokenizer(), VOCAB, limits=GrammarLimits(compile_s=2.0))
    body = {"prompt": "hi", "guided_grammar": ENDLESS, "timeout": 0.2, "stream": stream}
    began = time.monotonic()
    response = ask(COMPLETIONS, body, service=build_service(plain_runner(), grammars=grammars))
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - began < 1.5


def test_j_07_a_grammar_that_never_ends_is_a_400_and_delays_nobody() -> None:
    """The other request is asked for after the endless one, and answered before it."""
    limits = GrammarLimits(compile_s=0.5)
    service = build_service(plain_runner(), grammars=Grammars(FakeTokenizer(), VOCAB, limits=limits))
    order: list[str] = []

    async def run() -> httpx.Response:
        async with in_process(service) as client:

            async def post(name: str, **fields: object) -> httpx.Response:
                body = {"prompt": "hi", "max_tokens": 4, **fields}
                response = await client.post(COMPLETIONS, json=body)
                order.append(name)
                return response

            endless, other = await asyncio.gather(
                post("endless", guided_grammar=ENDLESS), post("other", ignore_eos=True)
            )
            assert other.status_code == 200
            assert (await post("next", guided_regex="a")).status_code == 200
            return endless

    response = asyncio.run(run())
    assert order == ["other", "endless", "next"]
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "guided_grammar")
    assert "within 0.5 s" in error["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_grammar_that_is_too_much_work_at_some_token_ends_its_reply_alone(streamed: bool) -> None:
    limits = GrammarLimits(work=WorkLimits(step_max_items=500))
    service = build_service(plain_runner(), grammars=Grammars(FakeTokenizer(), VOCAB, limits=limits))
    bodies: list[dict[str, Any]] = [
        {
            "prompt": "hi",
            "max_tokens": 100,
            "guided_grammar": 'start: e\ne: e e | e e e | "a"',
            "min_tokens": 99,
        },
        {"prompt": "hi", "max_tokens": 100, "ignore_eos": True},
    ]

    async def run() -> list[httpx.Response]:
        async with in_process(service) as client:
            posts = [client.post(COMPLETIONS, json={**body, "stream": streamed}) for body in bodies]
            return await asyncio.gather(*posts)

    ended, other = asyncio.run(run())
    assert other.status_code == 200
    if streamed:
        assert '"error":{"message":"after ' in ended.text
        assert "[DONE]" not in ended.text
    else:
        assert ended.status_code == 400
        assert ended.json()["error"]["message"].startswith("after ")
    assert service.engine.engine.scheduler.state.pool.num_used == 0


def test_the_runner_may_not_be_asked_for_what_the_form_forbids() -> None:
    """A runner that draws another token than it may is a fault that the grammar sees at the next one."""
    service = build_service(ScriptedRunner(spelled("xyz")))
    response = ask(COMPLETIONS, {"prompt": "hi", "guided_choice": ["abc"]}, service=service)
    assert response.status_code == 400


def test_a_model_without_an_end_of_text_refuses() -> None:
    class Endless(FakeTokenizer):
        @property
        def eos_ids(self) -> frozenset[int]:
            return frozenset()

    service = build_service(plain_runner(), grammars=Grammars(Endless(), VOCAB))
    response = ask(COMPLETIONS, {"prompt": [BOS, EOS], "guided_regex": "a"}, service=service)
    assert response.json()["error"]["message"].endswith("no end-of-text token")
