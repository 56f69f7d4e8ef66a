"""Replies that belong together get their room in the queue at once, whatever comes in between."""

import asyncio
import random

import pytest
from rigs import Gate, assert_idle, make_engine

from legato.engine.async_engine import AsyncEngine, Stream
from legato.engine.queue_limits import Reservation
from legato.errors import QueueFullError, RequestError, UnavailableError
from legato.sampling_params import SamplingParams
from legato.text.fake import FakeTokenizer

MAX_RUNNING, MAX_WAITING, MAX_TOKENS = 8, 12, 60
PARAMS = SamplingParams(max_tokens=3)


def limited(gate: Gate, *, max_waiting: int = MAX_WAITING, max_tokens: int | None = None) -> AsyncEngine:
    engine = make_engine(max_running=MAX_RUNNING, before=gate)
    return AsyncEngine(engine, FakeTokenizer(), max_waiting=max_waiting, max_waiting_tokens=max_tokens)


def room_left(served: AsyncEngine) -> int:
    """How many single replies still get in, found out by submitting them."""
    num = 0
    streams = list[Stream]()
    try:
        while True:
            streams.append(served.submit([1], PARAMS))
            num += 1
    except QueueFullError:
        return num
    finally:
        for stream in streams:
            with stream:
                pass


def test_d_17_nobody_takes_the_room_between_two_replies_of_one_request() -> None:
    async def scenario() -> None:
        gate = Gate()
        served = limited(gate)
        await served.start()
        with served.reserve(18, 18) as room:
            streams = [served.submit([1], PARAMS, reservation=room) for _ in range(16)]
            await asyncio.sleep(0)
            assert room_left(served) == MAX_RUNNING + MAX_WAITING - 18
            streams += [served.submit([1], PARAMS, reservation=room) for _ in range(2)]
            assert room == Reservation(0, 0)
        gate.open(1000)
        for stream in streams:
            with stream:
                assert len([delta async for delta in stream]) == 3
        await served.drain()
        await served.stop()
        assert_idle(served.engine)

    asyncio.run(scenario())


def test_the_prompt_tokens_of_replies_to_come_are_reserved_too() -> None:
    async def scenario() -> None:
        gate = Gate()
        served = limited(gate, max_tokens=MAX_TOKENS)
        await served.start()
        with served.reserve(2, 50) as room:
            first = served.submit([1] * 25, PARAMS, reservation=room)
            assert room == Reservation(1, 25)
            with pytest.raises(QueueFullError, match="50 prompt tokens wait and the request has 11 more"):
                served.submit([1] * 11, PARAMS)
            with served.submit([1] * 10, PARAMS):
                pass
        with first, served.submit([1] * 35, PARAMS):  # the other 25 are free again
            pass
        gate.open(1000)
        await served.stop()

    asyncio.run(scenario())


def test_a_reservation_that_finds_no_room_takes_none_and_one_that_is_left_gives_all_back() -> None:
    async def scenario() -> None:
        gate = Gate()
        served = limited(gate)
        await served.start()
        with served.reserve(15, 15):
            with pytest.raises(QueueFullError), served.reserve(6, 6):
                pass
            with served.reserve(5, 5):
                assert room_left(served) == 0
            assert room_left(served) == 5
        with served.reserve(20, 20) as room, served.submit([1], PARAMS, reservation=room):
            pass
        with (
            pytest.raises(RequestError, match="21 replies; at most 8 may run and 12 wait"),
            served.reserve(21, 21),
        ):
            pass
        assert room_left(served) == MAX_RUNNING + MAX_WAITING
        gate.open(1000)
        await served.stop()

    asyncio.run(scenario())


def test_the_end_of_the_server_waits_for_replies_that_have_their_room() -> None:
    """All of them or none: the first ones may be complete before the last one is submitted."""

    async def scenario() -> None:
        gate = Gate()
        gate.open(1000)
        served = limited(gate)
        await served.start()
        with served.reserve(2, 2) as room:
            with served.submit([1], PARAMS, reservation=room) as stream:
                assert len([delta async for delta in stream]) == 3
            draining = asyncio.create_task(served.drain())
            await asyncio.sleep(0.01)
            assert not draining.done()
            with served.submit([1], PARAMS, reservation=room) as stream:
                assert len([delta async for delta in stream]) == 3
        await draining
        await served.stop()
        with pytest.raises(UnavailableError):
            served.submit([1], PARAMS)

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_d_17_whatever_comes_and_goes_in_between_the_queue_keeps_to_its_limit(seed: int) -> None:
    """No step runs, so that all that is accepted stays; every request is accepted whole or not at all."""
    random_ = random.Random(seed)

    async def request(served: AsyncEngine, held: list[Stream]) -> None:
        num = random_.randint(1, 14)
        with served.reserve(num, num) as room:
            mine = list[Stream]()
            try:
                for _ in range(num):
                    mine.append(served.submit([1], PARAMS, reservation=room))
                    assert served.num_streams <= MAX_RUNNING + MAX_WAITING
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                for stream in mine:
                    with stream:
                        pass
                raise
        held += mine
        assert len(mine) == num

    async def scenario() -> None:
        gate = Gate()
        served = limited(gate)
        await served.start()
        held = list[Stream]()
        tasks = []
        for _ in range(30):
            tasks.append(asyncio.create_task(request(served, held)))
            if random_.random() < 0.3:
                random_.choice(tasks).cancel()
            await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {type(result) for result in results}
        assert kinds <= {type(None), QueueFullError, asyncio.CancelledError}, results
        assert served.num_streams == len(held) <= MAX_RUNNING + MAX_WAITING
        assert room_left(served) == MAX_RUNNING + MAX_WAITING - len(held)
        for stream in held:
            with stream:
                pass
        gate.open(1000)
        await served.drain()
        await served.stop()
        assert_idle(served.engine)

    asyncio.run(scenario())
