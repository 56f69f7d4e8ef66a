"""Engines over the fake runner, and a runner that can be told to fail or to wait."""

import itertools
import threading
from collections.abc import Callable

from legato.core.block_pool import BlockPool
from legato.core.invariants import check_state
from legato.core.lifecycle import FinishReason
from legato.core.prefill_policy import PrefillPolicy
from legato.core.request import Request, RequestId
from legato.core.scheduler import Scheduler
from legato.core.state import SchedulerConfig
from legato.core.step_plan import StepPlan, StepResult
from legato.engine.engine import Engine
from legato.engine.fake import FakeRunner
from legato.engine.protocol import Observer, Runner
from legato.metrics.journal import StepRecord
from legato.sampling_params import SamplingParams

VOCAB = 250


class Watcher:
    """An observer that remembers everything."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.submitted_ids: list[RequestId] = []
        self.aborts: list[tuple[RequestId, FinishReason]] = []

    def submitted(self, request: Request) -> None:
        self.submitted_ids.append(request.id)

    def stepped(self, record: StepRecord) -> None:
        self.records.append(record)

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:  # noqa: ARG002
        self.aborts.append((request_id, reason))


class WilfulRunner:
    """The fake runner behind a gate: `before` is called with each plan and may raise or block."""

    def __init__(self, inner: FakeRunner, before: Callable[[StepPlan], None]) -> None:
        self.inner = inner
        self.before = before
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size

    def run(self, plan: StepPlan) -> StepResult:
        self.before(plan)
        return self.inner.run(plan)


class Gate:
    """Lets `open()`-many steps through; the rest wait, so that a test can act while a step is in flight."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)

    def __call__(self, plan: StepPlan) -> None:  # noqa: ARG002
        self.entered.release()
        assert self.passes.acquire(timeout=10)

    def open(self, steps: int = 1) -> None:
        self.passes.release(steps)

    def wait(self) -> None:
        assert self.entered.acquire(timeout=10), "no step began"


def make_engine(
    *,
    budget: int = 16,
    max_running: int = 8,
    num_blocks: int = 64,
    block_size: int = 4,
    policy: PrefillPolicy | None = None,
    before: Callable[[StepPlan], None] = lambda _: None,
    observers: tuple[Observer, ...] = (),
) -> Engine:
    """A clock that goes up by one with each look."""
    config = SchedulerConfig(
        max_batch_tokens=budget,
        max_running=max_running,
        max_model_len=num_blocks * block_size,
        vocab_size=VOCAB,
    )
    fake = FakeRunner(num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB)
    runner: Runner = WilfulRunner(fake, before)
    scheduler = Scheduler(config, BlockPool(num_blocks, block_size), prefill_policy=policy)
    ticks = itertools.count()
    engine = Engine.on_runner(scheduler, runner, clock=lambda: float(next(ticks)))
    for observer in observers:
        engine.observe(observer)
    return engine


def make_request(name: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request(id=RequestId(name), prompt=prompt, params=params, arrival=0.0)


def assert_idle(engine: Engine) -> None:
    scheduler = engine.scheduler
    check_state(scheduler.state)
    assert not scheduler.state.has_work
    assert scheduler.state.pool.num_free == scheduler.state.pool.num_blocks
