"""What a simulation was like: numbers for programs, a table in words for people."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from legato.metrics.summary import Distribution, Latencies, latencies
from legato.metrics.timeline import COMPLETE
from legato.sim.recorder import LIMITS
from legato.sim.run import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class GapsOver:
    """Shares of all gaps between tokens that have a target."""

    target: float
    """Above it."""
    by_tenth: float
    """Above it by more than 10 %."""
    by_half: float
    """Above it by more than 50 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Seconds, tokens, requests; rates are per simulated second."""

    duration: float
    """From the start to the end of the last step."""
    num_requests: int
    finished: dict[str, int]
    """Requests by how they ended; `refused` could never be served."""
    latencies: Latencies
    good: float | None
    """Share of the requests with targets that are complete and met them; None if none has any."""
    goodput: float | None
    """Such requests a second."""
    gaps_over: GapsOver | None
    """None without a target."""
    prompt_rate: float
    """Prompt tokens computed a second."""
    output_rate: float
    """Tokens generated a second."""
    num_steps: int
    limits: dict[str, int]
    """Steps by what bounded their prompts."""
    busy: float
    """Share of the time in which a step ran."""
    max_running: int
    max_waiting: int
    max_blocks: float
    """The most of the KV cache that was held, 0 to 1."""
    num_preemptions: int

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def report(simulation: Simulation) -> Report:
    """The numbers of a simulation."""
    steps, ended = simulation.steps, simulation.ended
    duration = steps.start[-1] + steps.elapsed[-1] if len(steps) else 0.0
    num_requests = len(ended) + len(simulation.refused)
    finished = Counter(one.reason.value for one in ended if one.reason is not None)
    if simulation.refused:
        finished["refused"] = len(simulation.refused)
    judged = [one.met_targets for one in ended if one.met_targets is not None]
    limits = Counter(LIMITS[i].value for i in steps.limit)
    num_output = sum(one.num_generated for one in ended)
    return Report(
        duration=duration,
        num_requests=num_requests,
        finished=dict(finished),
        latencies=latencies(ended),
        good=sum(judged) / len(judged) if judged else None,
        goodput=sum(judged) / duration if judged else None,
        gaps_over=_gaps_over(simulation),
        prompt_rate=sum(steps.num_prefill) / duration if duration else 0.0,
        output_rate=num_output / duration if duration else 0.0,
        num_steps=len(steps),
        limits=dict(limits),
        busy=sum(steps.elapsed) / duration if duration else 0.0,
        max_running=max(steps.num_running, default=0),
        max_waiting=max(steps.num_waiting, default=0),
        max_blocks=max(steps.blocks_used, default=0) / simulation.scheduler.state.pool.num_blocks,
        num_preemptions=simulation.num_preemptions,
    )


def _gaps_over(simulation: Simulation) -> GapsOver | None:
    ratios = [
        gap / one.targets.tpot for one in simulation.ended if one.targets.tpot is not None for gap in one.itl
    ]
    if not ratios:
        return None
    shares = [sum(ratio > limit for ratio in ratios) / len(ratios) for limit in (1.0, 1.1, 1.5)]
    return GapsOver(target=shares[0], by_tenth=shares[1], by_half=shares[2])


def table(result: Report) -> Iterator[str]:
    """A table, line by line."""
    ends = ", ".join(f"{num:,} {how}" for how, num in result.finished.items() if how != "length")
    complete = sum(result.finished.get(reason.value, 0) for reason in COMPLETE)
    yield f"{complete:,} of {result.num_requests:,} requests complete" + (f" ({ends})" if ends else "")
    yield (
        f"{result.duration:,.1f} s, busy {result.busy:.0%}; {result.prompt_rate:,.0f} prompt tokens/s, "
        f"{result.output_rate:,.1f} generated/s"
    )
    yield ""
    yield f"{'ms':22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"
    names = result.latencies
    yield _row("time to first token", names.ttft)
    yield _row("gap between tokens", names.itl)
    yield _row("longest gap of a reply", names.stall)
    yield _row("mean gap of a reply", names.tpot)
    yield _row("whole reply", names.e2e)
    yield _row("wait in the queue", names.queue_time)
    yield ""
    if result.gaps_over is not None:
        over = result.gaps_over
        yield (
            f"gaps above the target: {over.target:.2%}; by over 10 %: {over.by_tenth:.2%}; "
            f"by over 50 %: {over.by_half:.2%}"
        )
    if result.goodput is not None and result.good is not None:
        yield f"goodput: {result.goodput:.3f} requests/s, {result.good:.1%} complete and within their targets"
    limits = ", ".join(f"{name} {num:,}" for name, num in sorted(result.limits.items()))
    yield f"steps: {result.num_steps:,}; prompts bounded by: {limits}"
    yield (
        f"at most {result.max_running} running, {result.max_waiting} waiting, "
        f"{result.max_blocks:.0%} of the KV cache held; {result.num_preemptions} preemptions"
    )


def _row(name: str, samples: Distribution | None) -> str:
    if samples is None:
        return f"{name:22}{'-':>10}"
    values = (samples.mean, samples.p50, samples.p90, samples.p99, samples.max)
    return f"{name:22}" + "".join(f"{1000 * value:>10,.1f}" for value in values)
