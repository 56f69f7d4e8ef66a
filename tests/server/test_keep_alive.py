"""Comments in a stream while there is nothing to tell, and prompt progress for who asks for it."""

import threading
from typing import Any

import openai
import pytest
from server_rig import (
    MODEL,
    Connect,
    ScriptedRunner,
    StartServer,
    ask,
    build_service,
    events_of,
    wait_until,
)

from legato.core.step_plan import StepPlan

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "stream": True},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "stream": True},
}
each_path = pytest.mark.parametrize("path", BODIES)
COMMENT = ": keep-alive\n\n"


class Pause:
    """Holds the step that would draw a reply's token of some number until it was silent for a while."""

    def __init__(self, num_generated: int, seconds: float) -> None:
        self._num_generated, self._seconds = num_generated, seconds
        self._never = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        if any(row.num_generated == self._num_generated for row in plan.sample):
            self._never.wait(self._seconds)


def text_with(path: str, keep_alive: float, pause: Pause, **body: object) -> str:
    service = build_service(ScriptedRunner(before=pause), sse_keep_alive=keep_alive)
    response = ask(path, {**BODIES[path], "max_tokens": 3, **body}, service=service)
    assert response.status_code == 200, response.text
    return response.text


@each_path
@pytest.mark.parametrize("num_generated", [0, 2], ids=["prefill", "decode"])
def test_comments_come_while_a_step_takes_long_and_at_no_other_time(path: str, num_generated: int) -> None:
    text = text_with(path, 0.05, Pause(num_generated, 0.3))
    assert 2 <= text.count(COMMENT) <= 6
    before, _, after = text.partition(COMMENT)
    assert before.count("data: ") == num_generated + (path == CHAT and num_generated > 0)
    after = after.replace(COMMENT, "")
    assert ":" in after
    assert len(events_of(before + after)) == (3 if path == COMPLETIONS else 4)


@each_path
@pytest.mark.parametrize("keep_alive", [0.0, 10.0])
def test_no_comment_comes_before_the_silence_is_long_enough_or_if_it_is_turned_off(
    path: str, keep_alive: float
) -> None:
    assert COMMENT not in text_with(path, keep_alive, Pause(0, 0.1))


def test_held_back_text_is_silence_too() -> None:
    """Tokens come, but nothing of them may be shown yet."""
    text = text_with(COMPLETIONS, 0.05, Pause(2, 0.15), stop=["abcX"])
    assert text.startswith(COMMENT)
    assert events_of(text.replace(COMMENT, ""))[0]["choices"][0]["text"] == "abc"


def test_a_whole_answer_has_no_comments() -> None:
    assert COMMENT not in text_with(COMPLETIONS, 0.02, Pause(0, 0.1), stream=False)


def test_the_official_client_does_not_see_comments(start_server: StartServer, connect: Connect) -> None:
    server = start_server(ScriptedRunner(before=Pause(0, 0.1)), sse_keep_alive=0.02)
    client: openai.OpenAI = connect(server)
    chunks = list(client.completions.create(model=MODEL, prompt="hi", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


def test_an_error_after_comments_is_an_event() -> None:
    """The status is sent by then."""

    def failing(plan: StepPlan) -> None:
        Pause(0, 0.1)(plan)
        raise RuntimeError("the device is on fire")

    service = build_service(ScriptedRunner(before=failing), sse_keep_alive=0.02)
    response = ask(COMPLETIONS, BODIES[COMPLETIONS], service=service)
    assert response.status_code == 200
    assert response.text.startswith(COMMENT)
    assert response.text.replace(COMMENT, "").startswith('data: {"error":{')
    assert "[DONE]" not in response.text


def test_refusals_keep_their_status_however_short_the_silence() -> None:
    service = build_service(sse_keep_alive=0.000001)
    response = ask(COMPLETIONS, {"prompt": "x" * 600, "stream": True}, service=service)
    assert response.status_code == 400


# -- prompt progress --------------------------------------------------------------------------------------

LONG = [1] * 150
"""Three steps of 64 tokens at most."""


def progress_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["progress"] for event in events if "progress" in event]


def streamed(path: str, *, options: dict[str, object], **body: object) -> list[dict[str, Any]]:
    body = {**BODIES[path], "max_tokens": 3, "stream_options": options, **body}
    response = ask(path, body, service=build_service())
    assert response.status_code == 200, response.text
    return events_of(response.text)


def test_progress_counts_the_prompts_tokens_until_the_first_token_of_the_reply() -> None:
    events = streamed(COMPLETIONS, prompt=LONG, options={"include_progress": True})
    told = progress_of(events)
    assert [entry["prefilled_tokens"] for entry in told] == [64, 128, 150]
    assert all(entry["prompt_tokens"] == 150 and entry["cached_tokens"] == 0 for entry in told)
    assert all((entry["index"], entry["queue_place"]) == (0, None) for entry in told)
    assert all(entry["predicted_ttft_ms"] > 0 for entry in told)
    assert ["progress" in event for event in events] == [True] * 3 + [False] * 3
    assert all(event["choices"] == [] for event in events[:3])
    assert {event["object"] for event in events} == {"text_completion"}


@each_path
def test_nobody_is_told_who_did_not_ask(path: str) -> None:
    for options in ({}, {"include_progress": False}):
        events = streamed(path, options=options)
        assert not progress_of(events)
        assert all(event["choices"] for event in events)


@each_path
def test_a_short_prompt_is_told_once_that_it_is_through(path: str) -> None:
    events = streamed(path, options={"include_progress": True, "include_usage": True})
    (entry,) = progress_of(events)
    assert entry["prefilled_tokens"] == entry["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"]
    assert "usage" in events[0]


def test_each_prompt_of_several_has_its_own_progress_and_place_in_the_queue() -> None:
    """Four run at once; who waits hears how many are before it."""

    def until_all_are_there(plan: StepPlan) -> None:  # noqa: ARG001
        if len(runner.plans) == 1:
            wait_until(lambda: service.engine.num_streams == 7)

    runner = ScriptedRunner(before=until_all_are_there)
    service = build_service(runner)
    prompts = [[number] * 20 for number in range(1, 8)]
    options = {"include_progress": True}
    body = {"prompt": prompts, "max_tokens": 5, "stream": True, "stream_options": options}
    told = progress_of(events_of(ask(COMPLETIONS, body, service=service).text))
    by_index = {i: [entry for entry in told if entry["index"] == i] for i in range(7)}
    assert all(entries[-1]["prefilled_tokens"] == 20 for entries in by_index.values())
    places = {i: [e["queue_place"] for e in entries] for i, entries in by_index.items()}
    waited = [i for i in range(7) if places[i][0] is not None]
    assert len(waited) >= 3
    for i in waited:
        queued = [place for place in places[i] if place is not None]
        assert queued == sorted(queued, reverse=True), "it only ever moves forward"


def test_the_official_client_can_read_progress(start_server: StartServer, connect: Connect) -> None:
    client = connect(start_server())
    options: Any = {"include_progress": True}
    stream = client.completions.create(model=MODEL, prompt=LONG, stream=True, stream_options=options)
    chunks = list(stream)
    told = [chunk.model_extra["progress"] for chunk in chunks if not chunk.choices and chunk.model_extra]
    assert [entry["prefilled_tokens"] for entry in told] == [64, 128, 150]
