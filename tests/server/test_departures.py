"""Clients that leave, on a real server: their requests end at once, and nothing of them stays."""

import asyncio
import gc
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server_rig import (
    BUDGET,
    MODEL,
    Connect,
    RunningServer,
    ScriptedRunner,
    StartServer,
    ask,
    build_service,
    in_process,
    plain_runner,
    slow,
    wait_until,
)

from legato.core.invariants import check_state

LONG: dict[str, Any] = {"prompt": "hi", "max_tokens": 500, "ignore_eos": True}


def post_raw(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """Send a request and return the open connection."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: legato\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def num_running(server: RunningServer) -> int:
    return len(server.scheduler.state.running)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_c_01_a_client_that_leaves_ends_its_replies_in_both_modes(
    start_server: StartServer, caplog: pytest.LogCaptureFixture, streamed: bool, n: int
) -> None:
    runner = ScriptedRunner(before=slow(0.01))
    server = start_server(runner)
    with post_raw(server, {**LONG, "stream": streamed, "n": n}) as connection:
        wait_until(lambda: len(runner.plans) > 5)
        if streamed:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
    server.wait_idle(1)
    assert len(runner.plans) < 50
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert 'finished_reason="abort"' in httpx.get(f"{server.url}/metrics").text


def test_c_01_an_sdk_that_closes_a_stream_ends_the_reply(start_server: StartServer, connect: Connect) -> None:
    server = start_server(ScriptedRunner(before=slow(0.01)))
    client = connect(server)
    with client.completions.create(model=MODEL, prompt="hi", max_tokens=400, stream=True) as stream:
        next(iter(stream))
    server.wait_idle(1)


@pytest.mark.parametrize("streamed", [True, False])
def test_c_02_leaving_during_the_prefill_stops_it(start_server: StartServer, streamed: bool) -> None:
    runner = ScriptedRunner(before=slow(0.05))
    server = start_server(runner)
    with post_raw(server, {"prompt": "x" * (7 * BUDGET), "max_tokens": 5, "stream": streamed}):
        wait_until(lambda: len(runner.plans) >= 2)
    server.wait_idle()
    assert len(runner.plans) < 7, "the prefill went on to its end"
    assert all(not plan.sample for plan in runner.plans)


def test_c_02_leaving_the_queue_ends_a_request_that_never_ran(start_server: StartServer) -> None:
    runner = ScriptedRunner(before=slow(0.01))
    server = start_server(runner)
    with post_raw(server, {**LONG, "n": 4}):
        wait_until(lambda: num_running(server) == 4)
        with post_raw(server, LONG):
            wait_until(lambda: len(server.scheduler.state.waiting) == 1)
        wait_until(lambda: len(server.scheduler.state.waiting) == 0)
        assert num_running(server) == 4
    server.wait_idle(1)


def test_c_04_dropped_streams_leave_their_slots_to_others(start_server: StartServer) -> None:
    server = start_server(ScriptedRunner(before=slow(0.005)))
    connections = [post_raw(server, {**LONG, "stream": True}) for _ in range(4)]
    wait_until(lambda: num_running(server) == 4)
    for connection in connections:
        connection.recv(100)
        connection.close()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 3}, timeout=1)
    assert answer.json()["choices"][0]["text"] == "abc"
    server.wait_idle()


def test_c_05_a_timeout_during_a_prefill_hurts_nobody_else(
    start_server: StartServer, connect: Connect
) -> None:
    """Nor does it hold anybody up: who decodes meanwhile is in every step."""
    runner = ScriptedRunner(before=slow(0.02))
    server = start_server(runner)
    client = connect(server)

    def decode() -> str:
        chunks = client.completions.create(model=MODEL, prompt="hi", max_tokens=30, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(decode)
        wait_until(lambda: num_running(server) == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": "x" * 400},
                timeout=httpx.Timeout(5, read=0.05),
            )
        assert other.result(10) == "abcdefghijklmnopqrstuvwxyzabcd"
    server.wait_idle()
    ids = [{seq.request_id for seq in plan.batch.seqs} for plan in runner.plans]
    (decoding,) = ids[0]
    assert all(decoding in step for step in ids[:30])
    assert any(len(step) == 2 for step in ids), "they met"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_slow_reader_delays_nobody(start_server: StartServer) -> None:
    """It reads nothing at all until the other one is done."""
    server = start_server()
    # 32 replies are several megabytes: more than the kernel's buffers take for a client that does not read.
    with post_raw(server, {**LONG, "stream": True, "n": 32, "logprobs": 5}) as connection:
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 50}, timeout=5
        )
        assert answer.status_code == 200
        server.wait_idle(20)
        received = b""
        connection.settimeout(5)
        while b"[DONE]" not in received[-100:]:
            received += connection.recv(1 << 16)
    assert received.count(b'"finish_reason":"length"') == 32
    assert len(received) > 4_000_000


def test_c_06_a_thousand_requests_leave_no_state() -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "hi", "max_tokens": 2},
        {"prompt": "hi", "max_tokens": 2, "n": 2},
        {"prompt": "hi", "max_tokens": 2, "stream": True},
        {"prompt": "hi", "max_tokens": 0},
        {"prompt": "hi", "stop": "a"},
    ]

    async def run() -> None:
        service = build_service(plain_runner())  # a scripted one remembers all plans
        async with in_process(service) as client:
            sizes = []
            for number in range(1000):
                body = bodies[number % len(bodies)]
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == (400 if body.get("max_tokens") == 0 else 200)
                if number % 500 == 499:
                    gc.collect()
                    sizes.append(len(gc.get_objects()))
            assert sizes[1] - sizes[0] < 100, "500 requests left something behind"
            scheduler = service.engine.engine.scheduler
            await service.engine.drain()
            assert service.engine.num_streams == 0
        assert not scheduler.state.has_work
        assert scheduler.state.pool.num_used == 0
        check_state(scheduler.state)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_c_07_requests_that_end_in_their_prefill_step_leave_no_block() -> None:
    """By their length, or because the first token is the end."""

    async def run() -> None:
        service = build_service()
        async with in_process(service) as client:
            long = asyncio.create_task(
                client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 400})
            )
            sizes = [1, 16, 17, BUDGET, BUDGET + 1, 200]
            for start in range(0, 200, 8):
                prompts = [[1] * sizes[number % len(sizes)] for number in range(start, start + 8)]
                for text, end in (("a", {"max_tokens": 1}), ("", {"stop_token_ids": [ord("a")]})):
                    answer = await client.post("/v1/completions", json={"prompt": prompts, **end})
                    assert [choice["text"] for choice in answer.json()["choices"]] == [text] * 8
            assert (await long).json()["usage"]["completion_tokens"] == 400
            await service.engine.drain()
        assert service.engine.engine.scheduler.state.pool.num_used == 0
        check_state(service.engine.engine.scheduler.state)

    asyncio.run(run())


def test_a_client_that_leaves_before_its_body_is_complete_leaves_nothing(start_server: StartServer) -> None:
    server = start_server()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.05)
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "hi"}).status_code == 200
    server.wait_idle()


def test_a_whole_answer_to_a_client_that_stays_is_complete() -> None:
    """The watch for departures must not take the end of the request's body for one."""
    assert ask("/v1/completions", {**LONG}).json()["usage"]["completion_tokens"] == 500
