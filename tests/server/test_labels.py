"""Labels ask nothing of the model and are ignored; instructions are obeyed or refused by name. An unknown
field is refused where it may be a misspelt instruction, and ignored elsewhere, with one line in the log."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from server_rig import ask, build_service

from legato.server.schema.base import Body
from legato.server.schema.bodies import ChatBody, CompletionBody, Message, TextPart
from legato.server.schema.tools import CalledFunction, FunctionTool, Tool, ToolCall
from legato.server.schema.unknown_fields import MAX_LOGGED, UnknownFields
from legato.text.chat import ChatTemplate

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STARTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}
ANYTHING = [None, True, False, "flex", 5, -1.5, [], [{"a": [1]}], {}, {"a": {"b": 1}}]
PLACES: dict[str, type[Body]] = {
    "messages[]": Message,
    "messages[].content[]": TextPart,
    "messages[].tool_calls[]": ToolCall,
    "messages[].tool_calls[].function": CalledFunction,
    "tools[]": Tool,
    "tools[].function": FunctionTool,
}


def chat_with(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A chat body with every kind of part in it, and `fields` at one place."""

    def at(here: str, part: dict[str, Any]) -> dict[str, Any]:
        return {**part, **fields} if here == place else part

    called = at("messages[].tool_calls[].function", {"name": "f", "arguments": "{}"})
    call = at("messages[].tool_calls[]", {"id": "call_1", "type": "function", "function": called})
    function = at("tools[].function", {"name": "f", "parameters": {"type": "object"}})
    return {
        "messages": [
            at("messages[]", {"role": "user", "content": "hi"}),
            {"role": "assistant", "content": [at("messages[].content[]", {"type": "text", "text": "so"})]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        ],
        "tools": [at("tools[]", {"type": "function", "function": function})],
        "tool_choice": "auto",
    }


def ids_of(body: dict[str, Any], **changes: Any) -> list[int]:
    """What the model reads."""
    conversation = {name: body[name] for name in ("messages", "tools") if name in body}
    answer = ask("/tokenize", conversation, service=build_service(**changes))
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["tokens"]
    return ids


@pytest.mark.parametrize("path", STARTS)
def test_n_04_a_label_is_accepted_with_any_value_and_changes_nothing(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = CompletionBody if path == COMPLETIONS else ChatBody
    plain = ask(path, STARTS[path]).json()["choices"]
    for value in ANYTHING:
        answer = ask(path, {**STARTS[path], **dict.fromkeys(kind.labels, value)})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain
    assert "unknown" not in caplog.text


@pytest.mark.parametrize("place", PLACES)
def test_n_04_labels_within_messages_and_tools_do_not_reach_the_template(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that writes all that it is given."""
    template = ChatTemplate("{{ messages | tojson }}{{ tools | tojson }}", bos_token="", eos_token="")
    plain = ids_of(chat_with("", {}), chat_template=template)
    for value in ANYTHING:
        body = chat_with(place, dict.fromkeys(PLACES[place].labels, value))
        assert ids_of(body, chat_template=template) == plain
    assert "unknown" not in caplog.text


@pytest.mark.parametrize("place", PLACES)
def test_n_04_an_unknown_field_there_is_ignored_with_one_line_however_often_it_comes(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = build_service()
    for mood in ("good", "bad"):
        answer = ask("/tokenize", {"messages": chat_with("", {})["messages"]}, service=build_service())
        body = {**chat_with(place, {"mood": mood}), "tool_choice": "none", "max_tokens": 1}
        answer = ask(CHAT, body, service=build_service(unknown_fields=service.unknown_fields))
        assert answer.status_code == 200, answer.text
    lines = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert lines == [f"requests have the unknown field {place}.mood; it is ignored"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "zebra", 1),
        (CHAT, "zebra", 1),
        (CHAT, "stream_options.colour", 1),
        (CHAT, "response_format.colour", 1),
    ],
)
def test_elsewhere_it_is_refused_or_ignored_as_the_operator_wants(
    path: str, field: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    name, _, inner = field.partition(".")
    more: dict[str, dict[str, Any]] = {
        "stream_options": {"stream": True},
        "response_format": {"response_format": {"type": "text"}},
    }
    body = {**STARTS[path], **more.get(name, {})}
    body[name] = {**body.get(name, {}), inner: value} if inner else value
    refused = ask(path, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert refused.json()["error"]["message"] == f"unknown field {field}"
    taken = ask(path, body, service=build_service(unknown_fields=UnknownFields(ignore=True)))
    assert taken.status_code == 200, taken.text
    assert [r.getMessage() for r in caplog.records if r.name == "legato.server.schema.unknown_fields"] == [
        f"requests have the unknown field {inner or field}; it is ignored"
    ]


def test_the_log_does_not_grow_with_the_names_that_clients_think_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unknown = UnknownFields()
    for number in range(3 * MAX_LOGGED):
        unknown.check(f"name{number}", "messages[]")
        unknown.check("my secret is 0000", "messages[]")
        unknown.check("x" * 65, "messages[]")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == MAX_LOGGED + 1
    assert not any("secret" in line or "xxx" in line for line in lines)
    assert lines[1] == (
        "requests have the unknown field messages[].(a name that is no identifier); it is ignored"
    )
    assert lines[-1] == f"more than {MAX_LOGGED} unknown fields: further ones are not logged"
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_the_page_in_the_docs_has_exactly_these_labels() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fields.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| (`.+`) \|$", page, flags=re.MULTILINE))
    told = {place.strip("`"): set(re.findall(r"`(.+?)`", labels)) for place, labels in rows.items()}
    body = told.pop("the body of `/v1/completions` and `/v1/chat/completions")
    assert body == CompletionBody.labels == ChatBody.labels
    assert told == {place: set(kind.labels) for place, kind in PLACES.items()}
    assert {kind.location for kind in PLACES.values()} == PLACES.keys()


def test_n_04_the_examples_of_the_case_are_answered() -> None:
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "hi", **ephemeral}],
        "id": "msg_1",
        "opts": {},
        "timestamp": 1,
        "provider_specific_fields": None,
        **ephemeral,
    }
    body = {
        "messages": [message],
        "store": True,
        "service_tier": "flex",
        "metadata": {"a": 1, "b": [True]},
        "think": False,
        "cache_prompt": True,
        "nvext": {"annotations": ["llm_metrics"], "agent_hints": {"osl": 5}},
        "top_logprobs": 0,
        "reasoning_effort": "none",
        "max_tokens": 2,
    }
    answer = ask(CHAT, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == ask(CHAT, STARTS[CHAT]).json()["choices"]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "unset"),
        ({"think": False}, "False"),
        ({"reasoning_effort": "none"}, "False"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "True"),
        ({"think": None, "reasoning_effort": None}, "unset"),
    ],
)
def test_no_thoughts_is_an_instruction_that_the_template_gets(fields: dict[str, Any], shown: str) -> None:
    template = ChatTemplate(
        "{{ enable_thinking | default('unset') }}{{ messages[0].content }}", bos_token="", eos_token=""
    )
    answer = ask(
        CHAT,
        {**STARTS[CHAT], **fields, "return_token_ids": True},
        service=build_service(chat_template=template),
    )
    assert bytes(answer.json()["prompt_token_ids"]) == f"{shown}hi".encode()


@pytest.mark.parametrize("think", [0, "false", True])
def test_thoughts_cannot_be_demanded(think: object) -> None:
    answer = ask(CHAT, {**STARTS[CHAT], "think": think})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "think")


# -- the type of a thing is looked at before its fields ---------------------------------------------------

WRONG_TYPES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "messages[0].content[1].type",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image_url", "image_url": {"url": ""}},
                    ],
                }
            ]
        },
        "images are not supported, it must be 'text'",
        "image",
    ),
    (
        "messages[0].content[0].type",
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "audio parts are not supported, it must be 'text'",
        "audio",
    ),
    (
        "messages[0].content[0].type",
        {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]},
        "must be 'text'",
        "no text at all",
    ),
    (
        "tools[0].type",
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        "custom tools are not supported, it must be 'function'",
        "custom tool",
    ),
    (
        "messages[0].tool_calls[0].type",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {}}]}]},
        "custom tools are not supported, it must be 'function'",
        "custom call",
    ),
    (
        "response_format.type",
        {"response_format": {"type": "regex", "value": "a*"}},
        "must be 'text', 'json_object' or 'json_schema'",
        "regex",
    ),
    (
        "response_format.type",
        {"response_format": {"type": 5, "json_schema": 7}},
        "must be 'text', 'json_object' or 'json_schema'",
        "number",
    ),
]


@pytest.mark.parametrize(("param", "fields", "problem", "name"), WRONG_TYPES)
def test_n_06_of_another_type_the_type_is_at_fault(
    param: str, fields: dict[str, Any], problem: str, name: str
) -> None:
    error = ask(CHAT, {**STARTS[CHAT], **fields}).json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param}: {problem}"), name


def test_n_06_no_error_has_doubled_braces() -> None:
    choices: list[object] = [5, "some", {"type": "function"}, {"type": "tool", "name": "f"}]
    for choice in choices:
        message = ask(CHAT, {**STARTS[CHAT], "tool_choice": choice}).json()["error"]["message"]
        assert message.endswith('{"type": "function", "function": {"name": ..}}')
        assert "{{" not in message


def test_no_template_of_an_error_doubles_its_braces() -> None:
    """Pydantic formats them only if they come with a context, and none of ours has braces and a context."""
    for file in (Path(__file__).parents[2] / "legato" / "server").glob("*.py"):
        for raised in re.findall(r"PydanticCustomError\((?:[^()]|\([^()]*\))*\)", file.read_text()):
            assert "{{" not in raised, (file.name, raised)
