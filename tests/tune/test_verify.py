"""Predicted against measured, on an engine whose steps take the time that they cost."""

import threading
import time

import pytest
from tune_rig import COST, arrivals, bench

from legato.core.lifecycle import FinishReason
from legato.core.step_plan import StepPlan
from legato.engine.engine import Engine
from legato.engine.fake import FakeRunner
from legato.metrics.summary import latencies
from legato.sim.run import new_scheduler
from legato.tune.setup import Setup
from legato.tune.trial import Bench
from legato.tune.verify import Comparison, compare, serve_in_real_time, verify
from legato.workload.arrival import Arrival, alone

SETUP = Setup(tpot_target_ms=100.0)


def sleeping_engine(trials: Bench, slower: float = 1.0) -> Engine:
    scheduler = new_scheduler(SETUP.on(trials.engine), trials.costs, trials.costs.cost_model())

    def seconds(plan: StepPlan) -> float:
        return slower * COST.seconds(plan.shape)

    runner = FakeRunner(
        num_blocks=scheduler.state.pool.num_blocks,
        block_size=scheduler.state.pool.block_size,
        vocab_size=scheduler.state.config.vocab_size,
        step_seconds=seconds,
    )
    return Engine.on_runner(scheduler, runner, clock=time.monotonic)


def test_what_costs_what_is_said_is_measured_as_predicted() -> None:
    workload = arrivals(8, 0.2, prompt=100, output=10)
    result = verify(sleeping_engine(bench(workload)), bench(workload), SETUP, workload)
    rows = result.rows
    assert result.pace == pytest.approx(1, abs=0.3)
    assert [row.name for row in rows] == [
        f"{name}, {which}"
        for name in ("time to first token", "gap between tokens")
        for which in ("p50", "p99")
    ]
    for row in rows:
        assert row.predicted < row.measured  # nothing sleeps less than it is told to
    assert rows[0].ratio == pytest.approx(1, abs=0.3)
    assert rows[2].ratio == pytest.approx(1, abs=0.3)


def test_a_machine_that_is_slower_than_its_costs_is_found_out() -> None:
    workload = arrivals(4, 0.2, prompt=60, output=10)
    result = verify(sleeping_engine(bench(workload), slower=2.0), bench(workload), SETUP, workload)
    rows = result.rows
    assert result.pace > 1.7
    assert not any(row.close for row in rows)
    assert all(row.ratio > 1.5 for row in rows)


def test_every_request_ends_and_nothing_is_left_running() -> None:
    """Also one whose client leaves, and one that can never be served."""
    workload = (
        *arrivals(2, 0.01, prompt=30, output=5),
        Arrival(time=0.02, parts=alone("leaves", 30), output_length=500, patience=0.1),
        Arrival(time=0.03, parts=alone("too long", 99_999), output_length=5),
        Arrival(time=0.04, parts=alone("last", 30), output_length=3),
    )
    trials = bench(workload)
    before = set(threading.enumerate())
    recorder = serve_in_real_time(sleeping_engine(trials), workload, trials.targets)
    ends = {timeline.request_id: timeline.reason for timeline in recorder.ended}
    assert ends == {
        "0": FinishReason.LENGTH,
        "1": FinishReason.LENGTH,
        "2": FinishReason.ABORT,
        "4": FinishReason.LENGTH,
    }
    assert all(t.ttft is not None and t.ttft > 0 for t in recorder.ended)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_a_tenth_is_close_and_more_is_not() -> None:
    assert Comparison(name="", predicted=1.0, measured=1.1 - 1e-9).close
    assert Comparison(name="", predicted=1.0, measured=0.9 + 1e-9).close
    assert not Comparison(name="", predicted=1.0, measured=1.11).close
    assert not Comparison(name="", predicted=1.0, measured=0.89).close


def test_what_one_side_does_not_have_is_not_compared() -> None:
    nothing = latencies(())
    assert compare([nothing], nothing) == ()
