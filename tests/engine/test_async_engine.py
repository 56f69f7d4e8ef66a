"""The engine's thread and the asyncio side: streams, cancellation, failures, shutdown."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rigs import Gate, Watcher, assert_idle, make_engine

from legato.core.lifecycle import FinishReason
from legato.core.step_plan import StepPlan
from legato.engine.async_engine import AsyncEngine, Stream
from legato.engine.engine import Engine
from legato.engine.fake import next_token
from legato.engine.output_processor import Delta, DetokenizeOptions
from legato.errors import ContextLengthError, RequestError, UnavailableError
from legato.sampling_params import SamplingParams
from legato.text.fake import FakeTokenizer
from legato.text.stop import StopStrings

VOCAB = 250


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[AsyncEngine]:
    async_engine = AsyncEngine(engine, FakeTokenizer())
    await async_engine.start()
    try:
        yield async_engine
    finally:
        await async_engine.stop()


def params(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


async def read(stream: Stream) -> list[Delta]:
    with stream:
        return [delta async for delta in stream]


def expected(prompt: list[int], num: int) -> list[int]:
    known = list(prompt)
    for _ in range(num):
        known.append(next_token(known, VOCAB))
    return known[len(prompt) :]


def test_a_stream_gives_each_token_once_and_then_ends() -> None:
    async def scenario() -> None:
        engine = make_engine()
        async with running(engine) as served:
            deltas = await read(served.submit([5, 7], params(5)))
        assert [d.sampled.token for d in deltas if d.sampled] == expected([5, 7], 5)
        assert [d.finish.reason for d in deltas if d.finish] == [FinishReason.LENGTH]
        assert_idle(engine)

    asyncio.run(scenario())


def test_many_streams_at_once_never_mix() -> None:
    """C-18, I-08."""

    async def scenario() -> None:
        engine = make_engine(budget=16, max_running=8)
        prompts = [[i, i + 1, i + 2] for i in range(40)]
        async with running(engine) as served:
            replies = await asyncio.gather(*(read(served.submit(p, params(6))) for p in prompts))
            assert served.num_streams == 0
        for prompt, deltas in zip(prompts, replies, strict=True):
            assert [d.sampled.token for d in deltas if d.sampled] == expected(prompt, 6)
        assert_idle(engine)

    asyncio.run(scenario())


def test_leaving_a_stream_aborts_it_and_the_others_go_on() -> None:
    """C-01, C-04."""

    async def scenario() -> None:
        watcher = Watcher()
        engine = make_engine(before=lambda _: time.sleep(0.002), observers=(watcher,))
        async with running(engine) as served:
            other = served.submit([9], params(50))
            with served.submit([5, 7], params(200)) as stream:
                await anext(stream)
            deltas = await read(other)
            assert len(deltas) == 50
            await served.drain()
        assert watcher.aborts == [(stream.request.id, FinishReason.ABORT)]
        assert_idle(engine)

    asyncio.run(scenario())


def test_no_chunk_follows_an_abort_during_a_long_prefill() -> None:
    """C-02: at most the step in flight, and the next one is that of who waited."""

    async def scenario() -> None:
        gate, watcher = Gate(), Watcher()
        engine = make_engine(budget=8, max_running=1, before=gate, observers=(watcher,))
        async with running(engine) as served:
            with served.submit(list(range(100)), params()) as left:
                await asyncio.to_thread(gate.wait)
                waits = served.submit([5], params(1))
            gate.open(1000)
            assert len(await read(waits)) == 1
        steps = [[run.request_id for run in record.schedule.runs] for record in watcher.records]
        assert steps == [[left.request.id], [waits.request.id]]
        assert_idle(engine)

    asyncio.run(scenario())


def test_a_stop_string_ends_the_reply_and_frees_its_blocks() -> None:
    """A-04: found in the text, cut off, and the engine is told."""

    async def scenario() -> None:
        watcher = Watcher()
        engine = make_engine(before=lambda _: time.sleep(0.002), observers=(watcher,))
        text = FakeTokenizer().decode(expected([5, 7], 12))
        stop = text[3:6]
        async with running(engine) as served:
            deltas = await read(served.submit([5, 7], params(200), text=DetokenizeOptions(stop=[stop])))
            for _ in range(100):
                if watcher.aborts:
                    break
                await asyncio.sleep(0.01)
        assert "".join(d.text for d in deltas) == text[:3]
        finish = deltas[-1].finish
        assert finish is not None
        assert (finish.reason, finish.stop) == (FinishReason.STOP, stop)
        assert [reason for _, reason in watcher.aborts] == [FinishReason.STOP]
        assert_idle(engine)

    asyncio.run(scenario())


def test_what_can_never_be_served_is_refused_before_anything_starts() -> None:
    """A-12."""

    async def scenario() -> None:
        engine = make_engine(num_blocks=4)
        async with running(engine) as served:
            with pytest.raises(ContextLengthError, match="at most 16"):
                served.submit([1] * 20, params())
            with pytest.raises(RequestError, match="no token"):
                served.submit([], params())
            assert served.num_streams == 0
        assert_idle(engine)

    asyncio.run(scenario())


def test_a_failed_step_ends_its_streams_with_the_reason_and_the_loop_lives_on() -> None:
    """A-13, C-05."""
    broken = True

    def before(plan: StepPlan) -> None:  # noqa: ARG001
        if broken:
            raise RuntimeError("boom")

    async def scenario() -> None:
        nonlocal broken
        engine = make_engine(before=before)
        async with running(engine) as served:
            finish = (await read(served.submit([5], params())))[-1].finish
            assert finish is not None
            assert finish.reason is FinishReason.ERROR
            assert "RuntimeError" in finish.message
            assert served.failure is None
            broken = False
            assert len(await read(served.submit([5], params(3)))) == 3
        assert_idle(engine)

    asyncio.run(scenario())


def test_a_loop_that_dies_tells_every_stream_and_refuses_new_ones() -> None:
    """G-12: and it says so."""

    async def scenario() -> None:
        engine = make_engine()
        async with running(engine) as served:
            engine.scheduler.schedule = lambda now: 1 / 0  # type: ignore[method-assign, assignment]  # noqa: ARG005
            finish = (await read(served.submit([5], params())))[-1].finish
            assert finish is not None
            assert finish.reason is FinishReason.ERROR
            assert served.failure is not None
            assert "ZeroDivisionError" in served.failure
            with pytest.raises(UnavailableError):
                served.submit([5], params())

    asyncio.run(scenario())


def test_a_loop_that_dies_also_answers_what_is_still_in_the_inbox() -> None:
    """G-12: a request that was submitted while the last step ran."""

    async def scenario() -> None:
        gate = Gate()

        def before(plan: StepPlan) -> None:
            gate(plan)
            raise SystemExit

        async with running(make_engine(before=before)) as served:
            first = served.submit([5], params())
            await asyncio.to_thread(gate.wait)
            second = served.submit([6], params())
            gate.open()
            for stream in (first, second):
                finish = (await asyncio.wait_for(read(stream), 10))[-1].finish
                assert finish is not None
                assert finish.reason is FinishReason.ERROR

    asyncio.run(scenario())


def test_stopping_aborts_what_is_left_and_refuses_what_comes() -> None:
    async def scenario() -> None:
        gate = Gate()
        engine = make_engine(before=gate)
        async with running(engine) as served:
            stream = served.submit([5], params(200))
            await asyncio.to_thread(gate.wait)
            gate.open(1)
            await anext(stream)
            stopping = asyncio.create_task(served.stop())
            while not stopping.done():
                gate.open(1)
                await asyncio.sleep(0.01)
            await stopping
            deltas = await read(stream)
            finish = deltas[-1].finish
            assert finish is not None
            assert finish.reason is FinishReason.ABORT
            with pytest.raises(UnavailableError):
                served.submit([5], params())
            assert served.failure == "the engine is shut down"
        assert_idle(engine)

    asyncio.run(scenario())


def test_drain_waits_for_the_last_reply() -> None:
    async def scenario() -> None:
        engine = make_engine()
        async with running(engine) as served:
            reading = asyncio.create_task(read(served.submit([5], params(100))))
            await served.drain()
            assert served.num_streams == 0
            assert len(await reading) == 100

    asyncio.run(scenario())


def test_an_id_in_use_is_refused_and_leaves_its_owner_alone() -> None:
    """C-10."""

    async def scenario() -> None:
        async with running(make_engine()) as served:
            stream = served.submit([5], params(3), request_id="mine")
            with pytest.raises(RequestError, match="'mine' is in use"):
                served.submit([6], params(3), request_id="mine")
            assert len(await read(stream)) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["left", "stop string"])
def test_an_id_is_in_use_until_the_engine_has_ended_what_had_it(end: str) -> None:
    """The step in flight still gives it tokens, and the abort its last event: not to a later request."""

    async def scenario() -> None:
        gate = Gate()
        engine = make_engine(before=gate)
        async with running(engine) as served:
            rules = DetokenizeOptions(stop=(chr(expected([5], 1)[0]),))
            stream = served.submit([5], params(200), request_id="mine", text=rules)
            await asyncio.to_thread(gate.wait)
            if end == "stop string":
                gate.open()
                gate.wait()  # in this thread: the abort must not come before the second step begins
                assert len(await read(stream)) == 1
            else:
                with stream:
                    pass
            assert served.num_streams == 0
            with pytest.raises(RequestError, match="'mine' is in use"):
                served.submit([6], params(3), request_id="mine")
            other = served.submit([7], params(2))
            gate.open(1000)
            assert len(await read(other)) == 2
            assert len(await read(served.submit([6], params(3), request_id="mine"))) == 3
        assert_idle(engine)

    asyncio.run(scenario())


def test_a_reply_that_cannot_be_written_ends_and_the_others_go_on() -> None:
    """A-02: the tokenizer breaks on one request's tokens, in a step with others."""

    class Brittle(FakeTokenizer):
        def token_bytes(self, id: int, *, skip_special: bool = True) -> bytes:
            if id == next_token([1], VOCAB):
                raise ValueError("no such text")
            return super().token_bytes(id, skip_special=skip_special)

    async def scenario() -> None:
        engine = make_engine()
        served = AsyncEngine(engine, Brittle())
        await served.start()
        prompts = ([5, 7], [1], [9, 30])
        replies = await asyncio.gather(*(read(served.submit(p, params(3))) for p in prompts))
        await served.stop()
        assert [len(deltas) for deltas in replies] == [3, 1, 3]
        finish = replies[1][-1].finish
        assert finish is not None
        assert finish.reason is FinishReason.ERROR
        assert_idle(engine)

    asyncio.run(scenario())


def test_a_reply_whose_last_text_cannot_be_made_ends_too() -> None:
    """A-02: the error that is told in its place does not need that text."""

    class Broken(StopStrings):
        def flush(self) -> str:
            raise ValueError("no such text")

    async def scenario() -> None:
        engine = make_engine()
        async with running(engine) as served:
            stream, other = served.submit([1], params(3)), served.submit([5, 7], params(3))
            stream.processor._stops = Broken(())
            deltas = await asyncio.wait_for(read(stream), 10)
            finish = deltas[-1].finish
            assert finish is not None
            assert (finish.reason, finish.message) == (FinishReason.ERROR, "the reply's text cannot be made")
            assert len(await read(other)) == 3
            await asyncio.wait_for(served.drain(), 10)
        assert_idle(engine)

    asyncio.run(scenario())


def test_a_loop_that_dies_on_a_command_answers_every_command_it_took() -> None:
    async def scenario() -> None:
        gate = Gate()
        engine = make_engine(before=gate)
        async with running(engine) as served:
            streams = [served.submit([5], params(1))]
            await asyncio.to_thread(gate.wait)
            streams += [served.submit([i], params(1)) for i in (6, 7, 8)]
            engine.submit = lambda request: 1 / 0  # type: ignore[method-assign, assignment, return-value]  # noqa: ARG005
            gate.open()
            ends = [(await asyncio.wait_for(read(s), 10))[-1].finish for s in streams]
        assert [end.reason for end in ends if end] == [FinishReason.LENGTH] + [FinishReason.ERROR] * 3

    asyncio.run(scenario())


def test_seeds_are_filled_in_and_differ() -> None:
    async def scenario() -> None:
        async with running(make_engine()) as served:
            streams = [served.submit([5], params(1)) for _ in range(2)]
            seeds = {stream.request.params.seed for stream in streams}
            for stream in streams:
                await read(stream)
        assert None not in seeds
        assert len(seeds) == 2

    asyncio.run(scenario())


def test_killing_clients_at_random_leaves_nothing_behind() -> None:
    """C-04, C-06: a few hundred clients that leave whenever they like."""

    async def client(served: AsyncEngine, rng: random.Random) -> int:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
        stay = rng.choice([0, 0, 1, 3, 100])
        got = 0
        with served.submit(prompt, params(rng.randrange(1, 30))) as stream:
            while got < stay and await anext(stream, None) is not None:
                got += 1
                await asyncio.sleep(rng.choice([0, 0, 0.001]))
        return got

    async def scenario() -> None:
        rng = random.Random(7)
        engine = make_engine(budget=16, max_running=6, num_blocks=40)
        async with running(engine) as served:
            clients = [asyncio.create_task(client(served, rng)) for _ in range(300)]
            for task in clients[::7]:
                await asyncio.sleep(0.001)
                task.cancel()
            got = await asyncio.gather(*clients, return_exceptions=True)
            assert {type(one) for one in got} <= {int, asyncio.CancelledError}, got
            assert sum(isinstance(one, int) and one > 0 for one in got) > 50
            assert served.num_streams == 0
            deltas = await read(served.submit([5, 7], params(5)))
            assert [d.sampled.token for d in deltas if d.sampled] == expected([5, 7], 5)
        assert_idle(engine)

    asyncio.run(scenario())
