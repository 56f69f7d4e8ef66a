"""Trials: one setup each, on one workload, in simulated time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from legato.config import EngineSettings
from legato.core.request import Request, RequestId
from legato.core.stopping import FinishReason
from legato.engine.cost_file import CostFile
from legato.metrics.journal import StepRecord
from legato.metrics.summary import Distribution
from legato.metrics.timeline import Targets
from legato.sim.report import Report, report
from legato.sim.run import Simulation, run_simulation
from legato.tune.setup import Setup
from legato.workload.arrival import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A setup, and what it made of the workload."""

    setup: Setup
    report: Report

    @property
    def good(self) -> float:
        """Share of the requests that are complete and met their targets; those that were refused did not."""
        refused = self.report.finished.get("refused", 0)
        return (self.report.good or 0.0) * (1 - refused / max(self.report.num_requests, 1))

    def ttft(self, which: str) -> float:
        """Seconds; `which` is a field of `Distribution`. Infinite if no reply ever began."""
        return _of(self.report.latencies.ttft, which, math.inf)

    def gap(self, which: str) -> float:
        """Seconds between two tokens, over all gaps of all replies; 0 if none has two tokens."""
        return _of(self.report.latencies.itl, which, 0.0)

    def stall(self, which: str) -> float:
        """Seconds of a reply's longest gap, over replies; 0 if none has two tokens."""
        return _of(self.report.latencies.stall, which, 0.0)


def _of(samples: Distribution | None, which: str, otherwise: float) -> float:
    return otherwise if samples is None else float(getattr(samples, which))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """All that a trial depends on beside its setup. The same setup gives the same trial."""

    engine: EngineSettings
    """Where a setup says nothing."""
    costs: CostFile
    arrivals: Sequence[Arrival]
    targets: Targets
    """What every trial is judged by, whatever its setup aims at."""
    max_model_len: int | None = None
    noise: bool = True
    seed: int = 0

    def run(self, setup: Setup) -> Trial:
        return Trial(setup=setup, report=report(self.simulate(setup)))

    def simulate(self, setup: Setup, limit: "StepLimit | None" = None) -> Simulation:
        return run_simulation(
            setup.on(self.engine),
            self.costs,
            self.arrivals,
            max_model_len=self.max_model_len,
            noise=self.noise,
            seed=self.seed,
            targets=self.targets,
            observers=() if limit is None else (limit,),
        )

    def served_in(self, setup: Setup, num_steps: int) -> tuple[Arrival, ...]:
        """The arrivals that have come when so many steps are over; all, if they need no more."""
        try:
            self.simulate(setup, StepLimit(num_steps))
        except EnoughError as enough:
            return tuple(arrival for arrival in self.arrivals if arrival.time <= enough.now)
        return tuple(self.arrivals)


class EnoughError(Exception):
    """So many steps were wanted, and were run."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.now = now


class StepLimit:
    """An observer that ends a simulation with `EnoughError`."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps

    def submitted(self, request: Request) -> None: ...

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None: ...

    def stepped(self, record: StepRecord) -> None:
        self._left -= 1
        if self._left <= 0:
            raise EnoughError(record.ended)
