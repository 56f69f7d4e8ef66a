"""How much more of a workload can come before a target is missed, and what is missed first then."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from legato.metrics.timeline import Targets
from legato.tune.setup import Setup
from legato.tune.trial import Bench, Trial
from legato.workload.arrival import scale

DEFAULT_TTFT_S = 10.0
"""The time to first token that counts as too long where no target says it: without any, a queue that grows
for ever would be no fault."""
TOLERANCE = 0.02
"""The highest rate is found to within this share of it."""
FACTORS = (1 / 64, 64.0)
"""The workload is slowed down and sped up by no more."""
FULL = 0.97
"""A share of blocks or time from which on there is nothing left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Of one setup on one workload, whose times are stretched or pressed together."""

    rate: float
    """Requests a second at which p99 of the time to first token and of the gaps are within the targets. 0 if
    they are at none."""
    present_rate: float
    """That of the workload as it is."""
    num_requests: int
    targets: Targets
    """With the default for a time to first token that has none."""
    beyond: Trial | None
    """At the least rate that was tried and is too high; None if none was."""
    beyond_rate: float | None


def highest(meets: Callable[[float], bool]) -> tuple[float, float]:
    """The greatest factor that was seen to meet, and the least one above it that was seen not to.

    Doubles or halves from 1 on within `FACTORS` and then cuts what is between in two, down to `TOLERANCE`.
    (0, x) if nothing meets; (x, infinity) if everything does. Assumes that less is met wherever more is.
    """
    low, high = 0.0, float("inf")
    factor = 1.0
    while FACTORS[0] <= factor <= FACTORS[1]:
        if meets(factor):
            low, factor = factor, 2 * factor
            if high < float("inf"):
                break
        else:
            high, factor = factor, factor / 2
            if low > 0:
                break
    if not 0 < low < high < float("inf"):
        return low, high
    while high / low > 1 + TOLERANCE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low, high


def find_capacity(
    bench: Bench, setup: Setup, *, progress: Callable[[str], None] = lambda _: None
) -> Capacity | None:
    """None for a workload without a rate: all comes at once. Runs about twelve trials."""
    span = max((arrival.time for arrival in bench.arrivals), default=0.0)
    if not span:
        return None
    targets = replace(bench.targets, ttft=bench.targets.ttft or DEFAULT_TTFT_S)
    present_rate = (len(bench.arrivals) - 1) / span
    trials: dict[float, Trial] = {}

    def meets(factor: float) -> bool:
        progress(f"capacity: {factor * present_rate:.3g} requests/s")
        faster = replace(bench, arrivals=scale(bench.arrivals, time=1 / factor))
        trials[factor] = faster.run(setup)
        return not misses(trials[factor], targets)

    low, high = highest(meets)
    return Capacity(
        rate=low * present_rate,
        present_rate=present_rate,
        num_requests=len(bench.arrivals),
        targets=targets,
        beyond=trials.get(high),
        beyond_rate=high * present_rate if high in trials else None,
    )


def misses(trial: Trial, targets: Targets) -> tuple[str, ...]:
    """Which targets a trial misses at p99, in words, the worst one first."""
    found: list[tuple[float, str]] = []
    for name, target, value in (
        ("time to first token", targets.ttft, trial.ttft("p99")),
        ("gap between tokens", targets.tpot, trial.gap("p99")),
    ):
        if target is not None and value > target:
            ms = f"{1000 * value:,.0f} ms, the target {1000 * target:,.0f} ms"
            found.append((value / target, f"p99 of the {name} is {ms}"))
    return tuple(text for _, text in sorted(found, reverse=True))


def bottleneck(trial: Trial, running_limit: int) -> str:
    """What there is no more of."""
    result = trial.report
    if result.num_preemptions or result.max_blocks > FULL:
        return f"the KV cache is full ({result.num_preemptions} preemptions)"
    if result.max_waiting and result.max_running >= running_limit:
        return f"all {running_limit} places are taken, at most {result.max_waiting} requests wait for one"
    return f"steps run {result.busy:.0%} of the time"
