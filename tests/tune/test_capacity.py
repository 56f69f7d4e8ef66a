"""The highest rate: found to within what is said, and what is missed beyond it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tune_rig import arrivals, bench, trial

from legato.metrics.timeline import Targets
from legato.tune.capacity import (
    DEFAULT_TTFT_S,
    FACTORS,
    TOLERANCE,
    bottleneck,
    find_capacity,
    highest,
    misses,
)
from legato.tune.setup import Setup
from legato.tune.trial import Trial

SETUP = Setup(tpot_target_ms=100.0)


@given(st.floats(FACTORS[0], FACTORS[1] * 0.99), st.floats(1, 2))
def test_the_limit_is_found_to_within_its_tolerance_and_grows_with_what_is_allowed(
    limit: float, more: float
) -> None:
    def found(limit: float) -> float:
        low, high = highest(lambda factor: factor <= limit)
        assert low <= limit < high
        assert high <= low * (1 + TOLERANCE) or math.isinf(high)
        return low

    assert found(limit) <= found(limit * more)


def test_all_and_nothing() -> None:
    assert highest(lambda _: True) == (64.0, math.inf)
    assert highest(lambda _: False) == (0.0, 1 / 64)


def test_a_machine_takes_as_much_as_its_steps_allow() -> None:
    """A prompt of 200 tokens costs 100 ms and its 20 tokens 20 ms: beside the steps' own 10 ms each, at most
    eight a second, and with steps of at most 100 ms it is above five."""
    trials = bench(arrivals(150, 0.5))
    capacity = find_capacity(trials, SETUP)
    assert capacity is not None
    assert capacity.present_rate == pytest.approx(2.0)
    assert 5 < capacity.rate < 8.4
    assert capacity.beyond is not None
    assert capacity.beyond_rate is not None
    assert capacity.rate < capacity.beyond_rate <= capacity.rate * (1 + TOLERANCE) + 1e-9
    assert misses(capacity.beyond, capacity.targets)


def test_stricter_targets_leave_less_and_less() -> None:
    trials = bench(arrivals(60, 0.5))
    rates = []
    for ttft in (0.25, 0.5, 2.0, None):
        capacity = find_capacity(replace(trials, targets=Targets(tpot=0.1, ttft=ttft)), SETUP)
        assert capacity is not None
        assert capacity.targets.ttft == (ttft or DEFAULT_TTFT_S)
        rates.append(capacity.rate)
    assert rates == sorted(rates)
    assert rates[0] < rates[2]


def test_what_comes_all_at_once_has_no_rate() -> None:
    assert find_capacity(bench(arrivals(5, 0.0)), SETUP) is None


def test_what_can_never_be_met_has_no_capacity() -> None:
    capacity = find_capacity(bench(arrivals(10, 0.5), ttft=0.001), SETUP)
    assert capacity is not None
    assert capacity.rate == 0.0
    assert capacity.beyond is not None
    assert "time to first token" in misses(capacity.beyond, capacity.targets)[0]


def test_the_worst_miss_comes_first() -> None:
    slow = trial(SETUP, good=0, ttft=3.0, gap=0.11)
    texts = misses(slow, Targets(ttft=2.0, tpot=0.1))
    assert [text.split(" is ")[0] for text in texts] == [
        "p99 of the time to first token",
        "p99 of the gap between tokens",
    ]
    assert texts[0].endswith("is 3,000 ms, the target 2,000 ms")
    assert misses(slow, Targets(tpot=0.11)) == ()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_preemptions": 3, "max_waiting": 9, "max_running": 8}, "KV cache is full (3 preemptions)"),
        ({"max_blocks": 0.99}, "KV cache is full"),
        ({"max_waiting": 9, "max_running": 8}, "all 8 places are taken, at most 9 requests wait"),
        ({"busy": 0.996}, "steps run 100% of the time"),
    ],
)
def test_what_there_is_no_more_of(changes: dict[str, float], text: str) -> None:
    one = trial(SETUP, good=0, ttft=3.0, gap=0.11)
    one = Trial(setup=SETUP, report=replace(one.report, **changes))
    assert text in bottleneck(one, 8)
