"""What a simulation is said to have been like, as numbers, words and charts."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from sim_rig import known_costs

from legato.config import EngineSettings
from legato.metrics.summary import distribution
from legato.metrics.timeline import Targets
from legato.sim.chart import cumulative, over_time, ticks
from legato.sim.plot import plot
from legato.sim.report import report, table
from legato.sim.run import run_simulation
from legato.workload.arrival import Arrival, Part

COSTS = known_costs()


def arrival(length: int, output: int, time: float = 0.0, **more: float) -> Arrival:
    return Arrival(time=time, parts=(Part(f"{length} at {time}", length),), output_length=output, **more)


def test_the_numbers_are_those_of_the_timelines() -> None:
    arrivals = [
        arrival(64, 50),
        arrival(2000, 2, 0.2),
        arrival(99_999, 1, 0.3),
        arrival(40, 500, 0.4, patience=0.5),
    ]
    settings = EngineSettings(tpot_target_ms=100.0, ttft_target_ms=1000.0)
    simulation = run_simulation(settings, COSTS, arrivals, noise=False)
    result = report(simulation)
    assert result.finished == {"length": 2, "abort": 1, "refused": 1}
    assert result.num_requests == 4
    stream, document = (next(one for one in simulation.ended if one.num_prompt == n) for n in (64, 2000))
    assert stream.targets == Targets(ttft=1.0, tpot=0.1)
    assert document.ttft is not None
    assert document.ttft > 1.0
    assert result.good == 0.5  # nobody knows what the one who left would have got
    assert result.goodput == pytest.approx(1 / result.duration)
    assert result.num_steps == len(simulation.steps) == sum(result.limits.values())
    assert result.latencies.itl is not None
    assert result.latencies.itl.num == sum(one.num_generated - 1 for one in simulation.ended)
    assert result.gaps_over is not None
    assert result.gaps_over.by_half == 0.0
    assert 0 < result.busy <= 1
    assert json.loads(json.dumps(result.to_json()))["latencies"]["ttft"]["num"] == 3


def test_percentiles_are_samples() -> None:
    samples = distribution([*range(1, 101), None])
    assert samples is not None
    assert (samples.num, samples.p50, samples.p90, samples.p99, samples.max) == (100, 50, 90, 99, 100)
    assert distribution([None]) is None


@pytest.mark.parametrize(
    "arrivals", [[arrival(64, 50), arrival(2000, 2, 0.2)], [arrival(64, 1)], [arrival(99_999, 1)]]
)
def test_words_and_charts_of_any_simulation(arrivals: list[Arrival]) -> None:
    """Of one with gaps, one without any, and one in which nothing ran."""
    simulation = run_simulation(EngineSettings(tpot_target_ms=100.0), COSTS, arrivals)
    lines = list(table(report(simulation)))
    assert any("time to first token" in line for line in lines)
    html = plot(simulation, "A <title>", "\n".join(lines))
    assert "<script" not in html
    assert "http" not in html
    root = ElementTree.fromstring(html.removeprefix("<!doctype html>").replace('<meta charset="utf-8">', ""))
    drawings = list(root.iter("svg"))
    assert len(drawings) == 6
    assert all("nan" not in ElementTree.tostring(drawing, encoding="unicode") for drawing in drawings)


@pytest.mark.parametrize(
    ("greatest", "expected"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (97, [0, 20, 40, 60, 80, 100]),
        (0, [0, 1]),
        (2000, [0, 500, 1000, 1500, 2000]),
    ],
)
def test_axes_have_round_numbers(greatest: float, expected: list[float]) -> None:
    assert ticks(greatest) == pytest.approx(expected)


def test_charts_are_thinned_out_and_keep_the_ends() -> None:
    points = cumulative([float(i) for i in range(10_000)])
    assert len(points) < 500
    assert points[-1] == (9999.0, 100.0)
    longest = over_time(list(range(10_000)), [7.0] * 9_999 + [9.0], worst=True)
    assert len(longest) <= 400
    assert longest[-1][1] == 9.0
