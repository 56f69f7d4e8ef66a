"""Serves a workload in real time on a real engine, and compares what was measured with what was predicted.

As a server does it, beside HTTP and text: requests come through the loop's inbox at their time, from another
thread, and the engine's own thread steps. The prompts are the simulator's; replies are greedy and have the
length that the workload says.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from legato.core.events import Event
from legato.core.request import RequestId
from legato.engine.engine import Engine
from legato.engine.loop import EngineLoop, is_last
from legato.metrics.summary import Latencies, latencies
from legato.metrics.timeline import Targets
from legato.sim.recorder import Recorder
from legato.sim.simulator import request_of
from legato.tune.setup import Setup
from legato.tune.trial import Bench
from legato.workload.arrival import Arrival, alone

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

    ids = range(1, engine.scheduler.config.vocab_size)
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
    ids = range(1, engine.scheduler.config.vocab_size)
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


def compare(predicted: Latencies, measured: Latencies) -> tuple[Comparison, ...]:
    """p50 and p99 of the time to first token and of the gaps, where both have any."""
    pairs = (
        ("time to first token", predicted.ttft, measured.ttft),
        ("gap between tokens", predicted.itl, measured.itl),
    )
    return tuple(
        Comparison(name=f"{name}, {which}", predicted=getattr(one, which), measured=getattr(other, which))
        for name, one, other in pairs
        if one is not None and other is not None
        for which in ("p50", "p99")
    )


def verify(engine: Engine, bench: Bench, setup: Setup, arrivals: Sequence[Arrival]) -> tuple[Comparison, ...]:
    """Serve `arrivals` on `engine`, which has `setup` and the costs of `bench`, and in simulated time.

    Noise is that of `bench`. What the engine learns while it serves the simulated one learns as well.
    """
    measured = serve_in_real_time(engine, arrivals, bench.targets)
    predicted = replace(bench, arrivals=arrivals).run(setup).report.latencies
    return compare(predicted, latencies(measured.ended))
