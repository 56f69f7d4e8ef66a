"""What a run was like: distributions over the timelines of its requests, and who met the targets.

The formulas are those of `timeline`; `docs/metrics.md` has them in symbols.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from legato.core.cost import quantile
from legato.core.request import Request
from legato.core.stopping import FinishReason
from legato.metrics.timeline import RequestTimeline

MAY_EXCEED = 0.01
"""Share of a reply's gaps that may be longer than its target: the target is on the 99th percentile."""


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
class Targets:
    """In seconds; None for none."""

    ttft: float | None = None
    tpot: float | None = None

    def of(self, request: Request) -> "Targets":
        """Those of a request on a server that has these."""
        return Targets(ttft=request.ttft_target or self.ttft, tpot=request.tpot_target or self.tpot)

    def are_met(self, timeline: RequestTimeline) -> bool:
        """By a reply that is complete: its TTFT, and its gaps but for `MAY_EXCEED` of them."""
        if timeline.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return False
        ttft, gaps = timeline.ttft, timeline.itl
        if self.ttft is not None and (ttft is None or ttft > self.ttft):
            return False
        over = 0 if self.tpot is None else sum(gap > self.tpot for gap in gaps)
        return over <= MAY_EXCEED * len(gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Over requests, in seconds; None where no request has one."""

    ttft: Distribution | None
    itl: Distribution | None
    """Over all gaps of all replies."""
    tpot: Distribution | None
    """Over replies."""
    e2e: Distribution | None
    queue_time: Distribution | None


def latencies(timelines: Iterable[RequestTimeline]) -> Latencies:
    """TTFT, gaps and queue time of all that have them; TPOT and E2E of complete replies alone."""
    timelines = tuple(timelines)
    complete = [t for t in timelines if t.reason in (FinishReason.STOP, FinishReason.LENGTH)]
    return Latencies(
        ttft=distribution(t.ttft for t in timelines),
        itl=distribution(gap for t in timelines for gap in t.itl),
        tpot=distribution(t.tpot for t in complete),
        e2e=distribution(t.e2e for t in complete),
        queue_time=distribution(t.queue_time for t in timelines),
    )
