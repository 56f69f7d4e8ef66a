"""Work that comes in crowds, or is large, is done in portions, beside the event loop, or not at all."""

import asyncio
import gc
import json
import socket
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import httpx
import pytest
from server_rig import MAX_LEN, ScriptedRunner, build_service, in_process, letters

from legato.core.events import TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import RequestId
from legato.core.step_plan import TokenLogprobs
from legato.engine import async_engine, loop
from legato.engine.loop import Abort, Inbox
from legato.engine.output_processor import Delta
from legato.errors import QueueFullError
from legato.sampling_params import SamplingParams
from legato.server.generation.replies import Replies
from legato.server.service import Limits
from legato.server.transport import event_loop, work_pool
from legato.server.transport.event_loop import MAX_SOCKETS, Turns, TurnSelector, run
from legato.server.transport.work_pool import LONG_THREADS, MAX_SHORT, WorkPool


class StandIn:
    """A stream of which nobody looks at more than that it exists."""


def test_c_16_a_backlog_is_read_in_portions_that_let_others_run() -> None:
    """Of a client that left, all at once was 2.4 s for everyone."""

    async def main() -> tuple[int, int]:
        turns = Turns()  # no event loop tells it of turns: each has lasted too long
        replies = Replies(turns)
        replies.streams.append(StandIn())  # type: ignore[arg-type]
        for _ in range(1000):
            replies.put(0, Delta("a", TokenLogprobs(97), None))
        others = 0

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        num_read = 0
        async for _ in replies.read():
            num_read += 1
            if num_read == 999:
                break
        task.cancel()
        return num_read, others

    num_read, others = asyncio.run(main())
    assert num_read == 999
    assert others >= 997


def test_a_turn_that_is_short_is_not_cut() -> None:
    turns = Turns()

    async def main() -> list[bool]:
        was_long = [turns.is_long]
        threading.Event().wait(3 * event_loop.MAX_SLICE_S)
        was_long.append(turns.is_long)
        await asyncio.sleep(0)
        return [*was_long, turns.is_long]

    assert run(main(), turns) == [False, True, False]
    assert turns.longest >= 3 * event_loop.MAX_SLICE_S
    assert turns.busy >= turns.longest


def test_one_turn_serves_some_sockets_and_no_socket_is_left_out() -> None:
    turns = Turns()
    with ExitStack() as stack:
        selector = stack.enter_context(TurnSelector(turns))
        for number in range(5 * MAX_SOCKETS + 3):
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            theirs.sendall(b"x")  # always ready: nobody reads
            selector.register(ours, 1, number)
        served = [[key.data for key, _ in selector.select(0)] for _ in range(40)]
    assert all(len(turn) == MAX_SOCKETS for turn in served)
    assert {number for turn in served for number in turn} == set(range(5 * MAX_SOCKETS + 3))


def test_events_that_come_together_are_fed_in_portions_and_in_order() -> None:
    async def main() -> list[list[int]]:
        service = build_service()
        engine = service.engine
        fed: list[int] = []
        turns: list[list[int]] = []
        await engine.start()
        ids = [RequestId(f"r{number}") for number in range(3 * async_engine.MAX_EVENTS)]
        for number, request_id in enumerate(ids):
            engine.submit(
                [1],
                SamplingParams(max_tokens=1),
                request_id=request_id,
                on_delta=lambda _, number=number: fed.append(number),
            )
        engine._dispatch(
            tuple(TokenEvent(request_id, TokenLogprobs(97), FinishReason.LENGTH, 0) for request_id in ids)
        )
        while len(fed) < len(ids):
            turns.append(fed.copy())
            await asyncio.sleep(0)
        await engine.stop()
        return [*turns, fed]

    turns = asyncio.run(main())
    assert turns[-1] == list(range(3 * async_engine.MAX_EVENTS))
    for before, after in pairwise(turns):
        assert len(after) - len(before) <= async_engine.MAX_EVENTS


def test_events_are_fed_whatever_those_before_them_raise() -> None:
    """A reader that always raises, at the first and the last place of a portion and in the middle of all."""
    broken = {0, async_engine.MAX_EVENTS - 1, 100}

    async def main() -> tuple[list[int], int, int]:
        engine = build_service().engine
        fed: list[int] = []
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        await engine.start()

        def take(number: int) -> None:
            if number in broken:
                raise OSError
            fed.append(number)

        async def dispatch(numbers: range) -> None:
            ids = [RequestId(f"r{number}") for number in numbers]
            for number, request_id in zip(numbers, ids, strict=True):
                engine.submit(
                    [1],
                    SamplingParams(max_tokens=1),
                    request_id=request_id,
                    on_delta=lambda _, number=number: take(number),
                )
            events = tuple(TokenEvent(each, TokenLogprobs(97), FinishReason.LENGTH, 0) for each in ids)
            asyncio.get_running_loop().call_soon(engine._dispatch, events)
            for _ in range(2 + len(events)):
                await asyncio.sleep(0)

        await dispatch(range(2 * async_engine.MAX_EVENTS))
        await dispatch(range(1000, 1010))
        left = engine.num_streams, len(engine._aborting)
        await asyncio.wait_for(engine.drain(), 10)
        await engine.stop()
        return (fed, *left)

    fed, num_streams, num_leaving = asyncio.run(main())
    assert fed == [n for n in (*range(2 * async_engine.MAX_EVENTS), *range(1000, 1010)) if n not in broken]
    assert (num_streams, num_leaving) == (0, 0)


def test_the_engine_takes_a_crowd_of_commands_in_portions_and_loses_none() -> None:
    inbox = Inbox()
    ids = [RequestId(str(number)) for number in range(3 * loop.MAX_COMMANDS + 1)]
    for request_id in ids:
        inbox.put(Abort(request_id, FinishReason.ABORT))
    inbox.close()
    taken = []
    while (commands := inbox.take(wait=True)) is not None:
        assert 1 <= len(commands) <= loop.MAX_COMMANDS
        taken += [command.request_id for command in commands if isinstance(command, Abort)]
    assert taken == ids


def test_short_work_does_not_wait_for_long_work() -> None:
    go_on = threading.Event()

    async def main() -> str:
        pool = WorkPool()
        long = [asyncio.create_task(pool.run(MAX_SHORT + 1, go_on.wait)) for _ in range(10)]
        await asyncio.sleep(0.05)
        done = await asyncio.wait_for(pool.run(MAX_SHORT, lambda: "short"), 10)
        assert not any(task.done() for task in long)
        go_on.set()
        assert await asyncio.gather(*long) == [True] * 10
        return done

    assert asyncio.run(main()) == "short"


def test_small_work_is_done_in_the_loop_and_large_work_beside_it() -> None:
    async def main() -> list[str]:
        pool = WorkPool()
        sizes = (0, work_pool.MAX_INLINE, work_pool.MAX_INLINE + 1, MAX_SHORT, MAX_SHORT + 1)
        return [await pool.run(size, lambda: threading.current_thread().name) for size in sizes]

    here = threading.current_thread().name
    assert asyncio.run(main()) == [here, here, "legato-short-work", "legato-short-work", "legato-long-work"]


def test_the_pool_is_bounded_and_skips_work_that_nobody_waits_for() -> None:
    go_on = threading.Event()
    done: list[int] = []

    async def main() -> None:
        pool = WorkPool(max_waiting=4)
        busy = [asyncio.create_task(pool.run(MAX_SHORT + 1, go_on.wait)) for _ in range(2)]
        left = asyncio.create_task(pool.run(MAX_SHORT + 1, lambda: done.append(1)))
        stays = asyncio.create_task(pool.run(MAX_SHORT + 1, lambda: done.append(2)))
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFullError, match="4 requests wait"):
            await pool.run(MAX_SHORT + 1, lambda: None)
        assert await pool.run(MAX_SHORT, lambda: 7) == 7
        left.cancel()
        go_on.set()
        await asyncio.gather(stays, *busy)
        with pytest.raises(ZeroDivisionError):
            await pool.run(MAX_SHORT + 1, lambda: 1 // 0)

    asyncio.run(main())
    assert done == [2]


def test_work_that_nobody_waits_for_holds_nothing_while_it_is_in_its_queue() -> None:
    """Clients that leave while all threads are busy must not leave their texts behind."""

    class Text:
        pass

    async def main() -> None:
        pool, go_on = WorkPool(), threading.Event()
        busy = [
            asyncio.create_task(pool.run_in_thread(MAX_SHORT + 1, go_on.wait)) for _ in range(LONG_THREADS)
        ]
        text = Text()
        left = asyncio.create_task(pool.run_in_thread(MAX_SHORT + 1, partial(id, text)))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        gone = weakref.ref(text)
        del left, text
        gc.collect()
        assert gone() is None
        go_on.set()
        await asyncio.gather(*busy)

    asyncio.run(main())


def test_a_pool_that_is_no_longer_used_ends_its_threads() -> None:
    async def main() -> list[threading.Thread]:
        pool = WorkPool()
        return [
            await pool.run_in_thread(size, threading.current_thread) for size in (MAX_SHORT, MAX_SHORT + 1)
        ]

    threads = asyncio.run(main())
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_long_work_has_a_lower_priority_than_steps() -> None:
    import os
    import sys

    if sys.platform != "linux":
        pytest.skip("only Linux has a priority for each thread")

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def main() -> list[int]:
        pool = WorkPool()
        return [await pool.run(size, niceness) for size in (0, MAX_SHORT, MAX_SHORT + 1)]

    here, short, long = asyncio.run(main())
    assert here == short
    assert long == min(here + work_pool.LONG_NICENESS, 19) or long == work_pool.NICENESS


def test_bodies_that_are_held_are_limited_and_let_go_with_the_answer() -> None:
    go_on = threading.Event()

    def before(_: object) -> None:
        assert go_on.wait(10)

    body: dict[str, Any] = {"prompt": [1] * 300, "max_tokens": 1}
    size = len(json.dumps(body).encode())

    async def main() -> None:
        service = build_service(
            ScriptedRunner(letters, before=before), limits=Limits(all_body_bytes=2 * size + 10)
        )
        async with in_process(service) as client:

            async def post() -> httpx.Response:
                return await client.post("/v1/completions", content=json.dumps(body).encode())

            first = [asyncio.create_task(post()) for _ in range(2)]
            while service.engine.num_streams < 2:
                await asyncio.sleep(0.005)
            refused = await post()
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert str(2 * size + 10) in refused.json()["error"]["message"]
            go_on.set()
            assert [answer.status_code for answer in await asyncio.gather(*first)] == [200, 200]
            assert (await post()).status_code == 200

    asyncio.run(main())


def test_bodies_that_never_end_do_not_keep_small_ones_out() -> None:
    small = {"prompt": "hi", "max_tokens": 1}
    limit = 1024 * len(json.dumps(small).encode())

    async def endless() -> AsyncIterator[bytes]:
        yield b" " * (limit - 1)
        await asyncio.Event().wait()

    async def main() -> tuple[int, int]:
        async with in_process(build_service(limits=Limits(all_body_bytes=limit))) as client:
            held = asyncio.create_task(client.post("/v1/completions", content=endless()))
            for _ in range(10):
                await asyncio.sleep(0)
            answers = [
                await client.post("/v1/completions", content=json.dumps(body).encode())
                for body in (small, {**small, "user": "x" * 10})
            ]
            held.cancel()
            await asyncio.wait([held])
            return answers[0].status_code, answers[1].status_code

    assert asyncio.run(main()) == (200, 429)


def test_one_body_alone_may_be_larger_than_all_may_be_together() -> None:
    async def main() -> int:
        service = build_service(limits=Limits(all_body_bytes=10))
        async with in_process(service) as client:
            return (await client.post("/v1/completions", json={"prompt": "hi"})).status_code

    assert asyncio.run(main()) == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * (6 * MAX_LEN)}),
        ("/v1/completions", {"prompt": ["hi", "é" * (3 * MAX_LEN)]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * (6 * MAX_LEN)}]}),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    path: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> httpx.Response:
        service = build_service()
        assert service.model.tokenizer.longest_token == len("<bos>")
        for name in ("encode", "encode_chat"):
            monkeypatch.setattr(
                type(service.model.tokenizer), name, lambda *_, **__: pytest.fail("tokenized")
            )
        async with in_process(service) as client:
            return await client.post(path, json=body)

    answer = asyncio.run(main())
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"at most {MAX_LEN} tokens of at most 5 bytes each" in error["message"]


def test_a_text_that_is_to_be_cut_or_counted_may_be_longer() -> None:
    async def main() -> None:
        async with in_process(build_service()) as client:
            text = "x" * (6 * MAX_LEN)
            cut = {"prompt": text, "truncate_prompt_tokens": 9, "max_tokens": 1}
            answer = await client.post("/v1/completions", json=cut)
            assert answer.json()["usage"]["prompt_tokens"] == 9
            counted = await client.post("/tokenize", json={"prompt": text})
            assert counted.json()["count"] == len(text) + 1
            messages = [{"role": "user", "content": text}]
            counted = await client.post("/tokenize", json={"messages": messages})
            assert counted.json()["count"] > len(text)

    asyncio.run(main())


def test_a_place_in_the_queue_is_taken_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what can find no place is tokenized first, and holds up who has one."""
    go_on, begun = threading.Event(), threading.Semaphore(0)

    async def main() -> None:
        service = build_service(engine_options={"max_waiting": 2}, max_running=1)
        assert service.model.chat_template is not None
        render = type(service.model.chat_template).render

        def slow(*arguments: Any, **options: Any) -> Any:
            begun.release()
            assert go_on.wait(10)
            return render(*arguments, **options)

        monkeypatch.setattr(type(service.model.chat_template), "render", slow)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        async with in_process(service) as client:
            first = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(3)]
            assert await asyncio.to_thread(begun.acquire, timeout=10)
            await asyncio.sleep(0.05)
            refused = await client.post("/v1/chat/completions", json=body)
            assert refused.status_code == 429
            go_on.set()
            assert [answer.status_code for answer in await asyncio.gather(*first)] == [200] * 3

    asyncio.run(main())
