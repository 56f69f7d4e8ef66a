"""From costs, a load and targets to an answer: which settings, what they give, how much more they take."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from legato.config import EngineSettings
from legato.errors import ConfigError
from legato.tune.capacity import Capacity, find_capacity
from legato.tune.frontier import knee, pareto
from legato.tune.search import Found, search, space_around
from legato.tune.trial import Bench, Trial

CAPACITY_SHARE = 5
"""Of so many parts of the steps, finding the capacity may take one, about; the search gets the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What came of it."""

    bench: Bench
    """With the part of the workload that was served."""
    num_arrivals: int
    """Of the whole workload."""
    max_steps: int
    found: Found
    front: tuple[Trial, ...]
    """p99 over replies of their longest gap, against p99 of the time to first token: what no other trial
    beats in both. Over all gaps, p99 would praise budgets whose few stalls are long: they are few."""
    knee: Trial | None
    """The trial at the bend of the front."""
    no_chunking: Trial
    """The best of those."""
    capacity: Capacity | None
    """Of the best; None for a workload without a rate."""

    @property
    def best(self) -> Trial:
        return self.found.best

    @property
    def engine(self) -> EngineSettings:
        """The settings that are recommended."""
        return self.best.setup.on(self.bench.engine)

    def to_json(self) -> dict[str, object]:
        capacity = None
        if self.capacity is not None:
            capacity = asdict(replace(self.capacity, beyond=None)) | {
                "beyond": None if self.capacity.beyond is None else trial_json(self.capacity.beyond)
            }
        return {
            "targets": asdict(self.bench.targets),
            "num_requests": len(self.bench.arrivals),
            "num_arrivals": self.num_arrivals,
            "num_steps": self.found.num_steps,
            "max_steps": self.max_steps,
            "complete": self.found.complete,
            "best": trial_json(self.best),
            "front": [trial_json(trial) for trial in self.front],
            "knee": None if self.knee is None else trial_json(self.knee),
            "no_chunking": trial_json(self.no_chunking),
            "capacity": capacity,
            "trials": [trial_json(trial) for trial in self.found.trials],
        }


def trial_json(trial: Trial) -> dict[str, object]:
    return {"setup": asdict(trial.setup), "good": trial.good, "result": trial.report.to_json()}


def tune(bench: Bench, *, max_steps: int, progress: Callable[[str], None] = lambda _: None) -> Tuning:
    """Search, draw the frontier, find the capacity.

    Serves as much of the workload as lets all trials run in `max_steps` simulated steps, about. Raises
    `ConfigError` if none of it can be served.
    """
    longest = max(arrival.input_length for arrival in bench.arrivals)
    max_model_len = min(bench.max_model_len or bench.costs.max_model_len, bench.costs.max_model_len)
    space = space_around(bench.engine, longest_prompt=longest, max_model_len=max_model_len)
    for_search = max_steps - max_steps // CAPACITY_SHARE
    served = bench.served_in(space.present, for_search // space.num_trials)
    num_arrivals, bench = len(bench.arrivals), replace(bench, arrivals=served)
    found = search(bench.run, space, max_steps=for_search, progress=progress)
    if found.best.ttft("p99") == math.inf:
        raise ConfigError(
            f"none of the {len(served)} requests that were simulated can be served: the longest prompt has "
            f"{longest} tokens, and at most {max_model_len} of prompt and reply fit"
        )
    points = [(trial.stall("p99"), trial.ttft("p99")) for trial in found.trials]
    front = pareto(points)
    bend = knee([points[i] for i in front])
    whole = [trial for trial in found.trials if trial.setup.prefill_chunk == 0]
    if not whole:
        raise ConfigError(
            f"max_steps is {max_steps}: they were used up after {len(found.trials)} trials, before any "
            "without chunking; give more",
            param="max_steps",
        )
    return Tuning(
        bench=bench,
        num_arrivals=num_arrivals,
        max_steps=max_steps,
        found=found,
        front=tuple(found.trials[i] for i in front),
        knee=None if bend is None else found.trials[front[bend]],
        no_chunking=min(whole, key=lambda trial: trial.ttft("p99")),
        capacity=find_capacity(bench, found.best.setup, progress=progress),
    )
