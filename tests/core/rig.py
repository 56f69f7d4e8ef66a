"""Schedulers small enough to follow by hand, driven by the fake runner."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from legato.core.block_pool import BlockPool
from legato.core.budget import Budget
from legato.core.events import Event, TokenEvent
from legato.core.invariants import check_schedule, check_state
from legato.core.output_lengths import OutputLengthEstimator
from legato.core.plan import plan
from legato.core.prefill_policy import PrefillPolicy
from legato.core.request import Request, RequestId
from legato.core.schedule import Schedule
from legato.core.scheduler import Scheduler
from legato.core.scheduling_policy import Fcfs, SchedulingPolicy
from legato.core.state import SchedulerConfig
from legato.core.step_plan import StepPlan
from legato.cost.step_cost import StepShape
from legato.engine.fake import FakeRunner, next_token
from legato.sampling_params import SamplingParams

VOCAB = 100


class NoForesight(OutputLengthEstimator):
    """Expects every reply to end with the next token but one, so that pools run out."""

    def remaining(self, num_generated: int) -> float:  # noqa: ARG002
        return 2.0


@dataclass
class Rig:
    """A scheduler and a fake runner, stepped by hand; the law is checked around every call."""

    scheduler: Scheduler
    runner: FakeRunner
    seconds: Callable[[StepShape], float] = lambda _: 1.0
    """How long a step takes."""
    now: float = 0.0
    events: list[Event] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)

    def add(
        self,
        name: str,
        prompt: Iterable[int] | int,
        max_tokens: int = 4,
        *,
        priority: int = 0,
        deadline: float | None = None,
        salt: str = "",
        tpot_target: float | None = None,
        **params: object,
    ) -> Request:
        """A prompt of the given ids, or of so many made-up ones, different for every name."""
        ids = prompt if not isinstance(prompt, int) else made_up(name, prompt)
        request = Request(
            id=RequestId(name),
            prompt=tuple(ids),
            params=SamplingParams(**{"max_tokens": max_tokens, "seed": 0, **params}),  # type: ignore[arg-type]
            arrival=0.0,
            priority=priority,
            deadline=deadline,
            cache_salt=salt,
            tpot_target=tpot_target,
        )
        self.scheduler.add(request)
        check_state(self.scheduler.state)
        return request

    def decide(self) -> Schedule:
        """Decide the next step twice, and see that deciding changes nothing."""
        schedule = self.scheduler.schedule(self.now)
        assert schedule == self.scheduler.schedule(self.now)
        check_state(self.scheduler.state)
        check_schedule(self.scheduler.state, schedule)
        return schedule

    def begin(self) -> StepPlan:
        """Decide, commit and plan a step; `finish` completes it."""
        schedule = self.decide()
        self.scheduler.commit(schedule)
        check_state(self.scheduler.state)
        self.schedules.append(schedule)
        return plan(self.scheduler.state, schedule)

    def finish(self, step: StepPlan) -> tuple[Event, ...]:
        self.now += self.seconds(step.shape)
        events = self.scheduler.complete(self.runner.run(step), self.now)
        check_state(self.scheduler.state)
        self.events += events
        return events

    def step(self) -> Schedule:
        self.finish(self.begin())
        return self.schedules[-1]

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.state.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def tokens(self, name: str) -> list[int]:
        """What was generated for a request."""
        return [e.sampled.token for e in self.events if isinstance(e, TokenEvent) and e.request_id == name]

    def assert_idle(self) -> None:
        """As at the start: nobody left, every block free."""
        assert not self.scheduler.state.running
        assert not self.scheduler.state.waiting
        assert self.scheduler.state.pool.num_free == self.scheduler.state.pool.num_blocks


def made_up(name: str, num: int) -> list[int]:
    """Tokens that look like no other request's: the first one is made from the name."""
    return [sum(map(ord, name)) % VOCAB, *(i % VOCAB for i in range(2, num + 1))]


def build_rig(
    *,
    budget: int = 8,
    max_running: int = 4,
    num_blocks: int = 64,
    block_size: int = 4,
    prefill_policy: PrefillPolicy | None = None,
    policy: SchedulingPolicy | None = None,
    output_lengths: OutputLengthEstimator | None = None,
    timed: Budget | None = None,
    seconds: Callable[[StepShape], float] = lambda _: 1.0,
    **config: Any,
) -> Rig:
    """First come, first served and without foresight, unless told otherwise. `timed` is a budget beside the
    plain one of `budget` tokens; `seconds` is how long a step takes."""
    limits = SchedulerConfig(
        max_batch_tokens=budget,
        max_running=max_running,
        max_model_len=num_blocks * block_size,
        vocab_size=VOCAB,
        **config,
    )
    scheduler = Scheduler(
        limits,
        BlockPool(num_blocks, block_size),
        prefill_policy=prefill_policy,
        budget=timed,
        policy=policy or Fcfs(),
        output_lengths=output_lengths or NoForesight(),
    )
    runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB)
    return Rig(scheduler, runner, seconds)


def expected_reply(prompt: Iterable[int], num: int) -> list[int]:
    """What the fake runner says after `prompt`, computed without any scheduler."""
    known = list(prompt)
    for _ in range(num):
        known.append(next_token(known, VOCAB))
    return known[len(known) - num :]
