"""What streams of both endpoints have in common, byte by byte, in this process."""

import logging
import re
from typing import Any

import pytest
from server_rig import ScriptedRunner, ask, build_service, events_of, failing_at, json_bytes, spelled

from legato.text.chat import ChatTemplate

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "stream": True},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "stream": True},
}
each_path = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def stream_text(path: str, runner: ScriptedRunner | None = None, **body: object) -> str:
    response = ask(path, {**BODIES[path], **body}, service=build_service(runner))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    return response.text


def text_of(path: str, events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["text"] if path == COMPLETIONS else c["delta"]["content"] for c in choices)


@each_path
def test_a_08_no_usage_is_sent_unasked(path: str) -> None:
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        events = events_of(stream_text(path, max_tokens=3, **options))
        assert all("usage" not in event for event in events)
        assert all(len(event["choices"]) == 1 for event in events)


@each_path
def test_a_08_usage_is_one_chunk_after_the_end_with_no_choices(path: str) -> None:
    events = events_of(stream_text(path, max_tokens=3, stream_options={"include_usage": True}))
    *before, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 3
    assert all(event["usage"] is None for event in before)
    assert before[-1]["choices"][0]["finish_reason"] == "length"


@each_path
@pytest.mark.parametrize(("text", "reason"), [("ok", "stop"), ("a longer reply", "length")])
def test_a_09_the_finish_reason_is_null_until_the_last_chunk(path: str, text: str, reason: str) -> None:
    events = events_of(stream_text(path, ScriptedRunner(spelled(text)), max_tokens=6, n=3))
    for index in range(3):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(reasons) - 1) + [reason]


@each_path
def test_a_10_chunks_share_id_time_and_model_and_have_their_endpoints_name(path: str) -> None:
    events = events_of(stream_text(path, max_tokens=4, stream_options={"include_usage": True}))
    heads = {(event["id"], event["object"], event["created"], event["model"]) for event in events}
    ((id, name, _, model),) = heads
    assert name == ("text_completion" if path == COMPLETIONS else "chat.completion.chunk")
    assert id.startswith("cmpl-" if path == COMPLETIONS else "chatcmpl-")
    assert (len(id.partition("-")[2]), model) == (24, "fake/model")


@each_path
def test_a_12_an_error_before_the_first_token_has_its_own_status(path: str) -> None:
    """A prompt that is too long, and a model that fails at the first token."""
    long = (
        {"prompt": "x" * 600}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": "x" * 600}]}
    )
    answers = [ask(path, {**BODIES[path], **long, "stream": streamed}) for streamed in (True, False)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].content == answers[1].content
    for streamed in (True, False):
        service = build_service(ScriptedRunner(before=failing_at(0)))
        answer = ask(path, {**BODIES[path], "stream": streamed}, service=service)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"


@each_path
def test_a_13_an_error_in_a_running_stream_is_an_event_and_the_end(path: str) -> None:
    text = stream_text(path, ScriptedRunner(before=failing_at(3)), max_tokens=10)
    *chunks, error, end = text.split("\n\n")
    assert end == ""
    assert text_of(path, events_of("\n\n".join([*chunks, "data: [DONE]", ""]))) == "abc"
    assert error.startswith('data: {"error":{"message":"')
    assert '"finish_reason":"' not in text
    assert "[DONE]" not in text
    assert "/secret" not in text


@each_path
def test_a_13_the_same_error_in_a_whole_answer_is_a_500(path: str) -> None:
    service = build_service(ScriptedRunner(before=failing_at(3)))
    answer = ask(path, {**BODIES[path], "stream": False, "max_tokens": 10}, service=service)
    assert answer.status_code == 500
    assert "/secret" not in answer.text


@each_path
def test_a_17_characters_that_some_clients_take_for_line_ends_are_escaped(path: str) -> None:
    text = "one\u2028two\u2029three\u0085four\nfive\r\nsix\U0001f600"
    sent = stream_text(path, ScriptedRunner(spelled(text)), max_tokens=100)
    assert sent.isascii()
    assert "\r" not in sent
    assert text_of(path, events_of(sent)) == text


@each_path
@pytest.mark.parametrize(("stop", "shown"), [("abcdefg", ""), (["defghij", "zz"], "abc")])
def test_a_04_no_part_of_a_stop_string_is_shown_in_either_mode(path: str, stop: object, shown: str) -> None:
    """One token a letter: the beginning of the stop string comes long before its end."""
    body = {"stop": stop, "max_tokens": 20}
    events = events_of(stream_text(path, ScriptedRunner(), **body))
    (choice,) = ask(path, {**BODIES[path], **body, "stream": False}).json()["choices"]
    whole = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert text_of(path, events) == whole == shown
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "stop"


@each_path
def test_a_02_bytes_that_are_no_text_become_the_same_text_in_both_modes(path: str) -> None:
    tokens = [0xF0, 0x9F, ord("a"), 0xFF, 0xC4, 0x8F, 0xE2]
    script = lambda row: tokens[row.num_generated]  # noqa: E731
    streamed = text_of(path, events_of(stream_text(path, ScriptedRunner(script), max_tokens=7)))
    body = {**BODIES[path], "stream": False, "max_tokens": 7}
    choice = ask(path, body, service=build_service(ScriptedRunner(script))).json()["choices"][0]
    assert streamed == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
    assert streamed == bytes(tokens).decode(errors="replace")


def test_a_bug_of_ours_is_logged_and_tells_the_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ChatTemplate):
        def render(self, *_: object, **__: object) -> str:
            raise ZeroDivisionError("secret")

    for streamed in (True, False):
        body = {**BODIES[CHAT], "stream": streamed}
        answer = ask(CHAT, body, service=build_service(chat_template=Broken("", bos_token="", eos_token="")))
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal server error"
    assert caplog.text.count("ZeroDivisionError: secret") == 2


@each_path
@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        ("my-id 7", "my-id 7"),
        ("x" * 1000, "x" * 128),
        ("a\x1b[31mred\x7f", "a[31mred"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", None),
        ("", None),
    ],
    ids=["plain", "long", "control characters", "not ASCII", "empty"],
)
def test_a_request_id_is_echoed_if_it_is_harmless_and_made_otherwise(
    path: str, sent: str, echoed: str | None
) -> None:
    headers = {"X-Request-ID": sent.encode("latin-1")}
    answer = ask(path, content=json_bytes({**BODIES[path], "max_tokens": 1}), headers=headers)  # type: ignore[arg-type]
    received = answer.headers["x-request-id"]
    assert received == echoed or (echoed is None and received.startswith("req-"))
    assert "my-id" not in answer.text


@each_path
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_prompts_are_logged_only_where_that_is_asked_for(
    path: str, streamed: bool, asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {**BODIES[path], "stream": streamed, "max_tokens": 1}
    service = build_service(log_prompts=asked, access_log=True)
    name = re.search(r'"id":"([^"]+)"', ask(path, body, service=service).text)
    assert name is not None
    prompt = "<bos>hi" if path == COMPLETIONS else "<bos><user>hi<assistant>"
    told = [record.getMessage() for record in caplog.records if record.name == "legato.prompts"]
    assert told == ([f"prompt of {name[1]}: {prompt}"] if asked else [])
    assert asked or "<bos>" not in caplog.text
