"""A simulation as a page of charts."""

from collections.abc import Iterator

from legato.sim.chart import Chart, Series, cumulative, over_time, page
from legato.sim.recorder import LIMITS
from legato.sim.run import Simulation


def plot(simulation: Simulation, title: str, text: str) -> str:
    """Self-contained HTML; `text` goes above the charts."""
    return page(title, text, tuple(_charts(simulation)))


def _charts(simulation: Simulation) -> Iterator[Chart]:
    steps, timelines = simulation.steps, simulation.ended
    targets = simulation.targets
    firsts = [1000 * t.ttft for t in timelines if t.ttft is not None]
    gaps = [(t.token_times[i], 1000 * t.gap_before(i)) for t in timelines for i in range(1, t.num_generated)]
    when, widths = [time for time, _ in gaps], [gap for _, gap in gaps]
    tpot = () if targets.tpot is None else (("target", 1000 * targets.tpot),)
    yield Chart(
        title="Time to first token",
        x="ms",
        y="% of requests",
        series=(Series(name="at most", points=cumulative(firsts)),),
    )
    yield Chart(
        title="Gaps between tokens",
        x="ms",
        y="% of gaps",
        series=(Series(name="at most", points=cumulative(widths)),),
    )
    yield Chart(
        title="Gaps over time",
        x="s",
        y="ms",
        series=(
            Series(name="longest", points=over_time(when, widths, worst=True)),
            Series(name="mean", points=over_time(when, widths, worst=False)),
        ),
        marks=tpot,
    )
    prefill = over_time(steps.start, steps.num_prefill, worst=False)
    decodes = over_time(steps.start, steps.num_decodes, worst=False)
    yield Chart(
        title="Tokens in a step",
        x="s",
        y="tokens",
        series=(
            Series(name="prompts", points=prefill, filled=True),
            Series(name="decodes", points=decodes, filled=True),
        ),
    )
    yield Chart(
        title="What bounds the prompts",
        x="s",
        y="% of steps",
        series=tuple(
            Series(name=limit.value, points=over_time(steps.start, shares, worst=False))
            for number, limit in enumerate(LIMITS)
            if any(shares := [100.0 * (kind == number) for kind in steps.limit])
        ),
    )
    yield Chart(
        title="Requests",
        x="s",
        y="requests",
        series=(
            Series(name="waiting", points=over_time(steps.start, steps.num_waiting, worst=True), filled=True),
            Series(name="running", points=over_time(steps.start, steps.num_running, worst=True)),
        ),
    )
