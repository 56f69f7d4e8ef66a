"""What a run was like: distributions over the timelines of its requests.

The formulas are those of `timeline`; `docs/metrics.md` has them in symbols.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from legato.cost.cost_model import quantile
from legato.metrics.timeline import COMPLETE, RequestTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of samples; all of the samples' unit."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Of those that are defined; None if none is. p90 is the least sample that 90 % of them are not above."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Distribution(
        num=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=quantile(ordered, 0.5),
        p90=quantile(ordered, 0.9),
        p99=quantile(ordered, 0.99),
        max=ordered[-1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Over requests, in seconds; None where no request has one."""

    ttft: Distribution | None
    itl: Distribution | None
    """Over all gaps of all replies."""
    stall: Distribution | None
    """The longest gap of each reply, over replies. One that is long among many short ones shows here, and not
    in the percentiles of all gaps."""
    tpot: Distribution | None
    """Over replies."""
    e2e: Distribution | None
    queue_time: Distribution | None


def latencies(timelines: Iterable[RequestTimeline]) -> Latencies:
    """TTFT, gaps and queue time of all that have them; TPOT and E2E of complete replies alone."""
    timelines = tuple(timelines)
    complete = [t for t in timelines if t.reason in COMPLETE]
    return Latencies(
        ttft=distribution(t.ttft for t in timelines),
        itl=distribution(gap for t in timelines for gap in t.itl),
        stall=distribution(max(t.itl, default=None) for t in timelines),
        tpot=distribution(t.tpot for t in complete),
        e2e=distribution(t.e2e for t in complete),
        queue_time=distribution(t.queue_time for t in timelines),
    )
