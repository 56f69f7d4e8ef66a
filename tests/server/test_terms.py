"""What a request may ask for beside its reply: priority, salt, timeout; the cache in usage; a full queue."""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from server_rig import (
    BLOCK_SIZE,
    MAX_RUNNING,
    ScriptedRunner,
    ask,
    build_service,
    events_of,
    in_process,
    slow,
)

from legato.core.request import Request
from legato.core.scheduling_policy import Priority
from legato.engine.async_engine import AsyncEngine
from legato.server.service import Service

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [1] * (2 * BLOCK_SIZE + 3)


class Watcher:
    """An observer that keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submitted(self, request: Request) -> None:
        self.requests.append(request)

    def stepped(self, record: object) -> None: ...

    def aborted(self, *_: object) -> None: ...


def limited(max_waiting: int, *, step_seconds: float = 0.02) -> Service:
    service = build_service(ScriptedRunner(before=slow(step_seconds)))
    engine = AsyncEngine(service.engine.engine, service.model.tokenizer, max_waiting=max_waiting)
    return replace(service, engine=engine)


async def several(service: Service, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """The answers to requests that come one after another, each while the ones before it are computed."""
    async with in_process(service) as client:
        tasks = []
        for body in bodies:
            tasks.append(asyncio.create_task(client.post(COMPLETIONS, json=body)))
            await asyncio.sleep(0.03)
        return await asyncio.gather(*tasks)


# -- cached tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_how_much_of_the_prompt_was_cached(stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}

    async def twice() -> list[Any]:
        async with in_process(build_service()) as client:
            answers = [await client.post(COMPLETIONS, json=body) for _ in range(2)]
            return [events_of(a.text)[-1] if stream else a.json() for a in answers]

    details = [answer["usage"]["prompt_tokens_details"] for answer in asyncio.run(twice())]
    assert details == [{"cached_tokens": 0}, {"cached_tokens": 2 * BLOCK_SIZE}]


def test_a_prompt_counts_once_in_cached_tokens_whatever_n() -> None:
    answer = ask(COMPLETIONS, {"prompt": [PROMPT, PROMPT[:5]], "n": 3, "max_tokens": 2}).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) + 5


def test_other_salts_share_nothing() -> None:
    bodies = [{"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt} for salt in ("a", "b", "a")]

    async def one_by_one() -> list[int]:
        async with in_process(build_service()) as client:
            answers = [(await client.post(COMPLETIONS, json=body)).json() for body in bodies]
            return [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]

    assert asyncio.run(one_by_one()) == [0, 0, 2 * BLOCK_SIZE]


# -- a full queue -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_answers_429_with_a_time_to_come_back(stream: bool) -> None:
    """Before any SSE byte, too; who was accepted is served."""
    body = {"prompt": [1, 2, 3], "max_tokens": 20, "stream": stream}
    answers = asyncio.run(several(limited(2), [body] * (MAX_RUNNING + 4)))
    statuses = [answer.status_code for answer in answers]
    assert statuses == [200] * (MAX_RUNNING + 2) + [429] * 2
    refused = answers[-1]
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert "2 requests wait, at most 2 may" in error["message"]
    assert int(refused.headers["retry-after"]) >= 1


def test_the_time_to_come_back_is_that_which_the_queue_takes() -> None:
    """One request ends every 2 s; ten wait."""
    service = limited(10)
    engine, now = service.engine, time.monotonic()
    engine.queue._ended_at.extend(now - 2 * i for i in range(10, 0, -1))
    assert engine.queue.seconds_to_drain(10) == pytest.approx(20, abs=1)
    engine.queue._ended_at.clear()
    assert engine.queue.seconds_to_drain(10) == 1, "nothing is known yet"


def test_a_quiet_hour_and_refused_requests_do_not_tell_how_fast_the_queue_moves() -> None:
    """Departures before the queue formed count for nothing, nor do a refused request's replies."""
    service = limited(2, step_seconds=0.2)
    engine = service.engine
    engine.queue._ended_at.extend([time.monotonic() - 3600] * 3)
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    served, refused = asyncio.run(several(service, [body, {**body, "n": MAX_RUNNING + 2}]))
    assert served.status_code == 200
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert len(engine.queue._ended_at) == 1


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ({"n": 3}, 3),
        ({"n": MAX_RUNNING + 2}, MAX_RUNNING + 2),
        ({"n": 3, "prompt": [[1, 2], [3, 4]]}, 6),
    ],
)
def test_an_idle_server_takes_all_replies_of_a_request_that_fit_into_places_and_queue(
    fields: dict[str, Any], num: int
) -> None:
    answer = ask(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 2, **fields}, service=limited(2))
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == num


@pytest.mark.parametrize(
    "fields", [{"n": MAX_RUNNING + 3}, {"n": 4, "prompt": [[1], [2]]}, {"n": 1, "prompt": [[1]] * 9}]
)
def test_more_replies_than_may_ever_run_and_wait_are_refused_for_good(fields: dict[str, Any]) -> None:
    """A 429 would make the client come back for ever."""
    num = fields["n"] * len(fields.get("prompt", [1]))
    answer = ask(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 2, **fields}, service=limited(2))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "n"
    assert f"{num} replies; at most {MAX_RUNNING} may run and 2 wait" in error["message"]


def test_as_many_at_once_as_there_are_places_find_an_idle_server_not_full() -> None:
    """All come before the first step: none of them waits for another."""
    body = {"prompt": [1, 2, 3], "max_tokens": 2}

    async def burst() -> list[int]:
        async with in_process(limited(1, step_seconds=0.2)) as client:
            posts = [client.post(COMPLETIONS, json=body) for _ in range(MAX_RUNNING + 1)]
            return [answer.status_code for answer in await asyncio.gather(*posts)]

    assert asyncio.run(burst()) == [200] * (MAX_RUNNING + 1)


def test_a_queue_that_waits_for_blocks_is_full_at_its_limit_whatever_places_are_free() -> None:
    """Each prompt needs half of the blocks and eight steps: one runs, three wait, three places are free."""
    body = {"max_tokens": 1, "ignore_eos": True}
    bodies = [{**body, "prompt": [i, *[1] * 490]} for i in range(5)]
    answers = asyncio.run(several(limited(3, step_seconds=0.03), bodies))
    assert [answer.status_code for answer in answers] == [200] * 4 + [429]


def test_what_finds_no_room_leaves_nothing_behind() -> None:
    """Neither of its replies, nor a trace of the ones that would have fitted."""
    body = {"prompt": [1, 2, 3], "max_tokens": 20}
    service = limited(2)
    answers = asyncio.run(several(service, [body, {**body, "n": MAX_RUNNING + 2}, {**body, "n": 3}]))
    assert [answer.status_code for answer in answers] == [200, 429, 200]
    assert f"{MAX_RUNNING + 2} replies" in answers[1].json()["error"]["message"]
    assert service.engine.num_streams == 0


# -- timeouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_running", [0, MAX_RUNNING])
def test_a_request_past_its_timeout_ends_with_an_error_wherever_it_is(num_running: int) -> None:
    """Running, or waiting behind others: no reply that looks complete, no prefill for nobody."""
    runner = ScriptedRunner(before=slow(0.02))
    others = [{"prompt": [1, 2], "max_tokens": 40, "ignore_eos": True}] * num_running
    late = {"prompt": [7, 7, 7], "max_tokens": 500, "timeout": 0.2}
    *served, answer = asyncio.run(several(build_service(runner), [*others, late]))
    assert all(other.status_code == 200 for other in served)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    if num_running:
        assert not any(7 in seq.tokens for plan in runner.plans for seq in plan.batch.seqs)


def test_a_stream_past_its_timeout_says_so_and_ends() -> None:
    service = build_service(ScriptedRunner(before=slow(0.02)))
    body = {"prompt": [1], "max_tokens": 500, "timeout": 0.2, "stream": True}
    response = ask(COMPLETIONS, body, service=service)
    *tokens, last = events_of(response.text + "data: [DONE]\n\n")
    assert tokens
    assert last["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in response.text


# -- targets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("sent", "tpot", "ttft"),
    [({}, None, None), ({"tpot_target_ms": 80, "ttft_target_ms": 1_500.5}, 0.08, 1.5005)],
)
def test_targets_reach_the_engine_in_seconds(
    path: str, sent: dict[str, float], tpot: float | None, ttft: float | None
) -> None:
    service, seen = build_service(), Watcher()
    service.engine.engine.observe(seen)
    prompt = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    answer = ask(path, {**prompt, **sent, "max_tokens": 2, "n": 2}, service=service)
    assert answer.status_code == 200
    assert [(r.tpot_target, r.ttft_target) for r in seen.requests] == [(tpot, ttft)] * 2


# -- priority ---------------------------------------------------------------------------------------------


def test_priority_is_obeyed_where_the_policy_is_and_refused_elsewhere() -> None:
    refused = ask(COMPLETIONS, {"prompt": "hi", "priority": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    assert "--policy priority" in refused.json()["error"]["message"]
    assert ask(COMPLETIONS, {"prompt": "hi", "priority": 0, "max_tokens": 1}).status_code == 200

    service = build_service(ScriptedRunner(before=slow(0.02)), takes_priority=True)
    scheduler = service.engine.engine.scheduler
    scheduler.state.policy = Priority()
    scheduler.state.waiting._policy = scheduler.state.policy
    body = {"prompt": [1, 2], "max_tokens": 30}
    later = [{**body, "priority": 5, "max_tokens": 1}, {**body, "priority": -5, "max_tokens": 1}]
    ends: list[int] = []

    async def run() -> None:
        async with in_process(service) as client:

            async def one(index: int, sent: dict[str, Any]) -> None:
                assert (await client.post(COMPLETIONS, json=sent)).status_code == 200
                ends.append(index)

            tasks = []
            for index, sent in enumerate([body] * MAX_RUNNING + later):
                tasks.append(asyncio.create_task(one(index, sent)))
                await asyncio.sleep(0.03)
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert ends.index(MAX_RUNNING + 1) < ends.index(MAX_RUNNING)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", 1e9),
        ("tpot_target_ms", 0),
        ("tpot_target_ms", "100"),
        ("ttft_target_ms", -1.5),
        ("ttft_target_ms", 3_600_001),
        ("timeout", "5"),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("cache_salt", 7),
        ("priority", 1.5),
        ("priority", 2**40),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_values_out_of_range_are_refused_by_name(path: str, field: str, value: object) -> None:
    prompt = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    response = ask(path, {**prompt, field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


def test_the_clients_of_openai_do_not_try_again_after_a_timeout() -> None:
    """Their rule: a header says whether a failed request is worth another try."""
    request = httpx.Request("POST", "http://legato")
    response = httpx.Response(504, headers={"x-should-retry": "false"}, request=request)
    assert not openai.OpenAI(api_key="none")._should_retry(response)


def test_d_17_single_requests_do_not_take_the_room_of_a_request_of_many_replies() -> None:
    """The many are submitted 16 at a time. All come in one turn of the loop, and no step runs before all are
    in: 4 may run and 20 wait, so beside the 22 there is room for 2."""
    held = threading.Event()
    service = build_service(ScriptedRunner(before=lambda _: held.wait(10) and None))
    service = replace(
        service, engine=AsyncEngine(service.engine.engine, service.model.tokenizer, max_waiting=20)
    )
    many, one = {"prompt": [1], "max_tokens": 1, "n": 22}, {"prompt": [1], "max_tokens": 1}

    async def burst() -> list[int]:
        async with in_process(service) as client:
            posts = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for body in [many, *[one] * 8]]
            await asyncio.sleep(0.3)
            held.set()
            return [answer.status_code for answer in await asyncio.gather(*posts)]

    statuses = asyncio.run(burst())
    assert statuses[0] == 200
    assert sorted(statuses[1:]) == [200] * 2 + [429] * 6
