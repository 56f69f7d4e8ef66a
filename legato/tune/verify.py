"""Serves a workload in real time on a real engine, and compares what was measured with what was predicted.

As a server does it, beside HTTP and text: requests come through the loop's inbox at their time, from another
thread, and the engine's own thread steps. The prompts are the simulator's; replies are greedy and have the
length that the workload says.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from legato.core.events import Event
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.cost.step_cost import StepCost
from legato.engine.engine import Engine
from legato.engine.loop import EngineLoop, is_last
from legato.metrics.journal import StepRecord
from legato.metrics.summary import Latencies, latencies
from legato.metrics.timeline import Targets
from legato.sim.recorder import Recorder
from legato.sim.simulator import request_of
from legato.tune.setup import Setup
from legato.tune.trial import Bench
from legato.workload.arrival import Arrival, alone

NUM_DRAWS = 5
MAX_DIFFERENCE = 0.1
"""Of measured and predicted: what is more is told."""
WARM_UP = Arrival(time=0.0, parts=alone("warm-up", 64), output_length=8)


def serve_in_real_time(engine: Engine, arrivals: Sequence[Arrival], targets: Targets) -> Recorder:
    """Returns once every request has ended. `engine` must be new; nobody else may use its model."""
    recorder = Recorder(targets)
    _warm_up(engine)
    engine.observe(recorder)
    left = len(arrivals)
    over = threading.Event()

    def deliver(events: tuple[Event, ...]) -> None:
        nonlocal left
        left -= sum(map(is_last, events))
        if left <= 0:
            over.set()

    ids = range(1, engine.scheduler.state.config.vocab_size)
    requests = [request_of(number, arrival, ids) for number, arrival in enumerate(arrivals)]
    loop = EngineLoop(engine, deliver)
    loop.start()
    start = engine.clock()
    try:
        for when, number, leaves in _comings_and_goings(arrivals):
            while (wait := start + when - engine.clock()) > 0:
                time.sleep(wait)
            if leaves:
                loop.abort(RequestId(str(number)))
            else:
                loop.submit(replace(requests[number], arrival=start + when))
        over.wait()
    finally:
        loop.close()
    return recorder


def _warm_up(engine: Engine) -> None:
    """Whatever a first step sets up is not the price of a step."""
    ids = range(1, engine.scheduler.state.config.vocab_size)
    request = request_of(0, WARM_UP, ids)
    engine.submit(replace(request, id=RequestId("warm-up"), arrival=engine.clock()))
    while engine.has_work:
        engine.step()


def _comings_and_goings(arrivals: Sequence[Arrival]) -> Iterator[tuple[float, int, bool]]:
    """(time, number of the request, whether it leaves), by time."""
    come = [(arrival.time, number, False) for number, arrival in enumerate(arrivals)]
    leave = [
        (arrival.time + arrival.patience, number, True)
        for number, arrival in enumerate(arrivals)
        if arrival.patience is not None
    ]
    yield from sorted(come + leave)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One number, predicted and measured, in seconds."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """measured / predicted."""
        return self.measured / self.predicted

    @property
    def close(self) -> bool:
        return abs(self.ratio - 1) <= MAX_DIFFERENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What came of serving in real time."""

    rows: tuple[Comparison, ...]
    pace: float
    """Measured / predicted seconds of a step, the median: how far the machine is from what it was when its
    costs were measured."""
    num_requests: int
    seconds: float
    """In which they came."""


def compare(predicted: Sequence[Latencies], measured: Latencies) -> tuple[Comparison, ...]:
    """p50 and p99 of the time to first token and of the gaps, where both sides have any; of several
    predictions the median."""
    rows: list[Comparison] = []
    for name, field in (("time to first token", "ttft"), ("gap between tokens", "itl")):
        known = [one for one in (getattr(latencies, field) for latencies in predicted) if one is not None]
        real = getattr(measured, field)
        if not known or real is None:
            continue
        for which in ("p50", "p99"):
            expected = median(getattr(one, which) for one in known)
            rows.append(
                Comparison(name=f"{name}, {which}", predicted=expected, measured=getattr(real, which))
            )
    return tuple(rows)


def verify(engine: Engine, bench: Bench, setup: Setup, arrivals: Sequence[Arrival]) -> Verification:
    """Serve `arrivals` on `engine`, which has `setup` and the costs of `bench`, and in simulated time.

    Noise is that of `bench`: `NUM_DRAWS` simulations with different draws, for one draw's p99 over few
    requests is a matter of luck. What the engine learns while it serves the simulated one learns as well.
    """
    steps = StepRatios(bench.costs.cost_model().cost)
    engine.observe(steps)
    measured = serve_in_real_time(engine, arrivals, bench.targets)
    simulated = [
        replace(bench, arrivals=arrivals, seed=bench.seed + number).run(setup).report.latencies
        for number in range(NUM_DRAWS if bench.noise else 1)
    ]
    return Verification(
        rows=compare(simulated, latencies(measured.ended)),
        pace=median(steps.ratios) if steps.ratios else 1.0,
        num_requests=len(arrivals),
        seconds=max((arrival.time for arrival in arrivals), default=0.0),
    )


class StepRatios:
    """An observer: measured / predicted of each step."""

    def __init__(self, cost: StepCost) -> None:
        self.ratios: list[float] = []
        self._cost = cost

    def submitted(self, request: Request) -> None: ...

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None: ...

    def stepped(self, record: StepRecord) -> None:
        seconds = record.ended - record.schedule.now
        self.ratios.append(seconds / self._cost.seconds(record.schedule.shape))
