"""Arrivals: who shares what after scaling, when they come, and what scenarios say."""

import json
import math
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.errors import ConfigError
from legato.workload.arrival import Arrival, Part, scale, select
from legato.workload.rhythm import Rhythm, retime
from legato.workload.scenario import SCENARIOS, Group, Scenario, find_scenario, read_scenario

PARTS = st.lists(st.builds(Part, st.sampled_from("abc"), st.integers(1, 40)), min_size=1, max_size=6)


def arrival(time: float = 0.0, *parts: Part, output: int = 10) -> Arrival:
    return Arrival(time=time, parts=parts or (Part("p", 100),), output_length=output)


def num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(PARTS, st.floats(0.01, 3))
def test_scaled_prompts_have_the_scaled_length(parts: list[Part], factor: float) -> None:
    [scaled] = scale([arrival(0, *parts)], lengths=factor)
    assert scaled.input_length == max(round(sum(part.length for part in parts) * factor), 1)
    assert len(scaled.prompt(range(50))) == scaled.input_length


@given(PARTS, PARTS, PARTS, st.sampled_from([1.0, 0.5, 0.125, 2.0]))
def test_a_shared_beginning_stays_shared_when_scaled(
    shared: list[Part], one: list[Part], other: list[Part], factor: float
) -> None:
    both = scale([arrival(0, *shared, *one), arrival(0, *shared, *other)], lengths=factor)
    prompts = [each.prompt(range(1 << 18)) for each in both]
    assert num_shared(*prompts) >= round(sum(part.length for part in shared) * factor)


def test_prompts_share_exactly_the_parts_that_they_have_in_common() -> None:
    one = arrival(0, Part("system", 30), Part("a", 50)).prompt(range(1 << 18))
    other = arrival(0, Part("system", 30), Part("b", 50)).prompt(range(1 << 18))
    shorter = arrival(0, Part("system", 20)).prompt(range(1 << 18))
    assert num_shared(one, other) == 30
    assert one[:20] == shorter


def test_ids_are_drawn_from_those_that_are_given() -> None:
    assert set(arrival().prompt(range(7, 10))) == {7, 8, 9}


def test_a_slice_starts_at_time_0() -> None:
    arrivals = [arrival(time) for time in (0, 1, 2, 3, 4)]
    assert [a.time for a in select(arrivals, start=1, duration=3)] == [0, 1, 2]
    assert [a.time for a in select(arrivals, start=1, limit=2)] == [0, 1]
    assert [a.time for a in scale(arrivals, time=0.5)] == [0, 0.5, 1, 1.5, 2]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_gaps_are_as_bursty_as_asked_at_the_rate_that_was_asked(burstiness: float) -> None:
    times = Rhythm(rate=5.0, burstiness=burstiness).times(4000, random.Random(1))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.01)
    assert statistics.pstdev(gaps) / 0.2 == pytest.approx(1 / math.sqrt(burstiness), rel=0.1, abs=1e-6)
    assert times[0] == 0.0


def test_an_infinite_rate_is_all_at_once() -> None:
    assert [a.time for a in retime([arrival(1), arrival(2)], Rhythm(rate=math.inf), 0)] == [0, 0]


@pytest.mark.parametrize("burstiness", [1e-300, 1e-4, 1e-3])
@pytest.mark.parametrize("num", [1, 3, 100])
def test_bursts_may_be_as_short_as_one_likes(burstiness: float, num: int) -> None:
    times = Rhythm(rate=2.0, burstiness=burstiness).times(num, random.Random(0))
    assert len(times) == num
    assert times == sorted(times)
    assert 0 <= times[-1] <= num / 2


@pytest.mark.parametrize("values", [{"rate": 0}, {"rate": math.nan}, {"rate": 1, "burstiness": -1}])
def test_a_pace_must_be_above_0(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        Rhythm(**values)


@pytest.mark.parametrize("name", SCENARIOS)
def test_built_in_scenarios_are_sorted_and_repeatable(name: str) -> None:
    arrivals = find_scenario(name).arrivals(3)
    assert arrivals == SCENARIOS[name].arrivals(3)
    assert [a.time for a in arrivals] == sorted(a.time for a in arrivals)
    assert len({a.parts[-1].name for a in arrivals}) == len(arrivals)


def test_requests_of_a_scenario_share_their_system_prompt_and_nothing_else() -> None:
    group = Group(requests=2, prompt=40, output=5, system=30)
    one, other = Scenario(description="", groups=(group,)).arrivals(0)
    assert num_shared(one.prompt(range(1 << 18)), other.prompt(range(1 << 18))) == 30


def test_lengths_are_spread_around_their_mean() -> None:
    group = Group(requests=2000, prompt=100, output=50, spread=0.5)
    arrivals = Scenario(description="", groups=(group,)).arrivals(0)
    lengths = [a.input_length for a in arrivals]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert statistics.mean(lengths) == pytest.approx(100, rel=0.02)


def test_a_scenario_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    groups = [
        {"requests": 2, "prompt": 10, "output": 3, "tpot_target_ms": 80, "priority": 1},
        {"at": 5, "rate": 2, "duration": 3, "burstiness": 1, "prompt": 20, "output": 4, "patience": 1.5},
    ]
    path.write_text(json.dumps({"description": "mine", "groups": groups}))
    arrivals = find_scenario(str(path)).arrivals(0)
    assert [a.input_length for a in arrivals] == [10] * 2 + [20] * 6
    assert (arrivals[0].tpot_target, arrivals[0].priority, arrivals[-1].patience) == (0.08, 1, 1.5)
    assert all(5 <= a.time < 8 for a in arrivals[2:])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"groups": []}', "groups is not a list"),
        ('{"groups": [3]}', "groups[0]: not an object"),
        ('{"groups": [{"prompt": 3}]}', "groups[0]: output is missing"),
        ('{"groups": [{"prompt": 3, "output": 0}]}', "groups[0]: output must be at least 1, not 0"),
        ('{"groups": [{"prompt": 3.5, "output": 1}]}', "groups[0]: prompt must be a whole number"),
        ('{"groups": [{"prompt": 3, "output": 1, "size": 2}]}', "groups[0]: no such field 'size'"),
        ('{"groups": [{"prompt": 3, "output": 1, "rate": "2"}]}', "groups[0]: rate must be a number"),
        ('{"groups": [{"prompt": 3, "output": 1, "duration": 2}]}', "duration goes with rate"),
        ('{"groups": [{"prompt": 3, "output": 1, "at": 1e999}]}', "at must be at most 1e+09, not inf"),
        ('{"groups": [{"prompt": 3, "output": 1, "patience": 1e999}]}', "patience must be at most"),
        (
            '{"groups": [{"prompt": 3, "output": 1, "tpot_target_ms": 1e10}]}',
            "tpot_target_ms must be at most",
        ),
        ('{"groups": [{"prompt": 3, "output": 1, "requests": 1000000000}]}', "at most 1,000,000 requests"),
        ('{"groups": [{"prompt": 3, "output": 1, "rate": 1e999, "duration": 1}]}', "at most 1,000,000"),
        ('{"groups": [{"prompt": 3, "output": 1, "spread": 2}]}', "spread must be at most 1"),
        ('{"groups": [{"prompt": 3, "output": 1}], "name": 1}', "not an object of"),
    ],
)
def test_what_is_wrong_in_a_scenario_is_said(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(table)
    with pytest.raises(ConfigError) as caught:
        read_scenario(path)
    assert str(path) in caught.value.message
    assert message in caught.value.message


def test_an_unknown_name_lists_the_built_in_ones() -> None:
    with pytest.raises(ConfigError, match="stall"):
        find_scenario("nonsense")
