"""Runs a workload on the real engine, scheduler and budget, in time that passes by formula.

Nothing is decided here. Arrivals are delivered when their time has come, as the engine's thread takes them
from its inbox: between two steps; a step takes as long as `StepTimes` says; an idle engine's clock jumps to
the next arrival. So the same history makes the same schedules as on a server, to the byte.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from legato.core.request import Request, RequestId
from legato.core.schedule import Schedule
from legato.core.scheduler import Scheduler
from legato.core.state import SchedulerState
from legato.core.step_plan import StepResult, TokenLogprobs
from legato.engine.engine import Engine
from legato.engine.protocol import Observer
from legato.errors import RequestError
from legato.sampling_params import SamplingParams
from legato.sim.times import SimulatedClock, StepTimes
from legato.workload.arrival import Arrival

TOKEN = TokenLogprobs(0)


class SimulatedExecutor:
    """Executes a schedule without a model: it moves the clock forward, and every token is 0.

    So a reply is never the beginning of another request's prompt.
    """

    def __init__(self, times: StepTimes, clock: SimulatedClock) -> None:
        self._times = times
        self._advance = clock.advance

    def execute(self, state: SchedulerState, schedule: Schedule) -> StepResult:  # noqa: ARG002
        seconds = self._times(schedule.shape)
        self._advance(seconds)
        num_sampled = len(schedule.decodes) + sum([1 for chunk in schedule.chunks if chunk.is_last])
        return StepResult((TOKEN,) * num_sampled, seconds)


class Refused(NamedTuple):
    """An arrival that the engine did not take."""

    number: int
    """Its place in the workload."""
    reason: str


def simulate(
    scheduler: Scheduler,
    arrivals: Iterable[Arrival],
    times: StepTimes,
    *,
    max_steps: int | None = None,
    observers: Iterable[Observer] = (),
) -> tuple[Refused, ...]:
    """Serve all of a workload, sorted by time, or as much as `max_steps` steps do. Returns who could not be
    served; `observers` see the rest.

    Request ids are places in the workload: "0", "1", ...
    """
    clock = SimulatedClock()
    engine = Engine(scheduler, SimulatedExecutor(times, clock), clock=clock)
    for observer in observers:
        engine.observe(observer)
    ids = range(1, scheduler.state.config.vocab_size)  # 0 is what replies are made of
    coming = deque(enumerate(arrivals))
    leaving: list[tuple[float, int]] = []
    """A heap: when a client leaves, and whose number it is."""
    refused: list[Refused] = []
    while (engine.has_work or coming) and scheduler.state.step != max_steps:
        if not engine.has_work:
            clock.now = max(clock.now, coming[0][1].time)
        while coming and coming[0][1].time <= clock.now:
            number, arrival = coming.popleft()
            _leave(engine, leaving, arrival.time)
            try:
                engine.submit(request_of(number, arrival, ids))
            except RequestError as error:
                refused.append(Refused(number, error.message))
            if arrival.patience is not None:
                heapq.heappush(leaving, (arrival.time + arrival.patience, number))
        _leave(engine, leaving, clock.now)
        if engine.has_work:
            engine.step()
    return tuple(refused)


def _leave(engine: Engine, leaving: list[tuple[float, int]], now: float) -> None:
    """Clients whose patience is over leave. To whom has its reply nothing happens."""
    while leaving and leaving[0][0] <= now:
        _, number = heapq.heappop(leaving)
        engine.abort(RequestId(str(number)))


def request_of(number: int, arrival: Arrival, ids: range) -> Request:
    """The request that a client sends."""
    return Request(
        id=RequestId(str(number)),
        prompt=arrival.prompt(ids),
        params=SamplingParams(max_tokens=arrival.output_length, temperature=0.0, seed=0),
        arrival=arrival.time,
        priority=arrival.priority,
        tpot_target=arrival.tpot_target,
        ttft_target=arrival.ttft_target,
    )
