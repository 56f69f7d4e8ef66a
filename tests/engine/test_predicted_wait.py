"""Waiting is limited by the time that it is predicted to take, so that what is let in also ends."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from legato.core.block_pool import BlockPool
from legato.core.budget import TargetBudget
from legato.core.events import TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.scheduler import Scheduler
from legato.core.state import SchedulerConfig
from legato.core.step_plan import StepPlan, StepResult, TokenLogprobs
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepCost
from legato.engine.async_engine import AsyncEngine, Stream
from legato.engine.engine import Engine
from legato.engine.fake import FakeRunner
from legato.engine.queue_limits import MIN_RATE_SAMPLES
from legato.errors import QueueFullError
from legato.sampling_params import SamplingParams
from legato.text.fake import FakeTokenizer

PROMPT = [1] * 100


class Held:
    """A runner that computes nothing until it is let go."""

    num_blocks, block_size = 512, 16

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self._runner = FakeRunner(num_blocks=512, block_size=16, vocab_size=258)

    def run(self, plan: StepPlan) -> StepResult:
        self.go_on.wait(30)
        return self._runner.run(plan)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def engine_of(max_wait: float, *, price: float | None = None) -> Iterator[tuple[AsyncEngine, Clock]]:
    """`price`: seconds of a prompt's token, for a budget that knows prices."""
    config = SchedulerConfig(max_batch_tokens=64, max_running=1, max_model_len=512, vocab_size=258)
    cost = StepCost(step=0.001, head=0, decode=0, prefill=price or 0.0, context=0, pair=0)
    budget = None if price is None else TargetBudget(64, CostModel(prior=cost))
    clock, runner = Clock(), Held()
    scheduler = Scheduler(config, BlockPool(512, 16), budget=budget)
    engine = AsyncEngine(Engine.on_runner(scheduler, runner, clock=clock), FakeTokenizer(), max_wait=max_wait)
    try:
        yield engine, clock
    finally:
        runner.go_on.set()


def submit(engine: AsyncEngine, stack: ExitStack) -> Stream:
    return stack.enter_context(engine.submit(PROMPT, SamplingParams(max_tokens=400)))


def test_waiting_is_limited_by_the_pace_of_the_last_prompts() -> None:
    """A prompt of 100 tokens every 5 s: three of them are 15 s."""

    async def main() -> None:
        with engine_of(12.0) as (engine, clock), ExitStack() as stack:
            await engine.start()
            streams = [submit(engine, stack) for _ in range(MIN_RATE_SAMPLES + 3)]
            until = time.monotonic() + 10
            while not engine.engine.scheduler.state.running and time.monotonic() < until:
                await asyncio.sleep(0.005)
            for stream in streams[:MIN_RATE_SAMPLES]:
                clock.now += 5
                engine._dispatch((TokenEvent(stream.request.id, TokenLogprobs(97), None, 0),))
            with pytest.raises(QueueFullError, match="predicted wait is 15 s, at most 12 s") as caught:
                submit(engine, stack)
            assert caught.value.retry_after_s == 3
            with pytest.raises(QueueFullError), engine.reserve(1, 0):
                pass
            engine._dispatch((TokenEvent(streams[MIN_RATE_SAMPLES].request.id, TokenLogprobs(97), None, 0),))
            submit(engine, stack)  # two prompts are 10 s

    asyncio.run(main())


def test_waiting_is_limited_by_the_pace_at_which_requests_end() -> None:
    """Short prompts and long replies: who waits, waits for places."""

    async def main() -> None:
        with engine_of(100.0) as (engine, clock), ExitStack() as stack:
            await engine.start()
            streams = [submit(engine, stack) for _ in range(MIN_RATE_SAMPLES + 20)]
            until = time.monotonic() + 10
            while not engine.engine.scheduler.state.running and time.monotonic() < until:
                await asyncio.sleep(0.005)
            for stream in streams[:MIN_RATE_SAMPLES]:
                clock.now += 10
                event = TokenEvent(stream.request.id, TokenLogprobs(97), FinishReason.LENGTH, 0)
                engine._dispatch((event,))
            with pytest.raises(QueueFullError, match="predicted wait is"):
                submit(engine, stack)

    asyncio.run(main())


def test_before_there_is_a_pace_the_price_of_a_token_tells() -> None:
    async def main() -> None:
        with engine_of(25.0, price=0.1) as (engine, _), ExitStack() as stack:
            await engine.start()
            for _ in range(3):
                submit(engine, stack)
            with pytest.raises(QueueFullError, match="predicted wait is 30 s, at most 25 s"):
                submit(engine, stack)

    asyncio.run(main())


def test_an_idle_server_takes_any_prompt_and_without_a_limit_everything_waits() -> None:
    async def main() -> None:
        with engine_of(0.001, price=10.0) as (engine, _), ExitStack() as stack:
            await engine.start()
            submit(engine, stack)
        with engine_of(float("inf"), price=10.0) as (engine, _), ExitStack() as stack:
            await engine.start()
            for _ in range(50):
                submit(engine, stack)

    asyncio.run(main())
