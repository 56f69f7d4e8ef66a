"""The log line: rates over some seconds of work, and silence otherwise."""

import logging

import pytest
from metrics_rig import make_world

from legato.core.step_plan import StepPlan
from legato.metrics.throughput import ThroughputLog


def test_a_line_every_ten_seconds_of_work(caplog: pytest.LogCaptureFixture) -> None:
    world = make_world(budget=8, num_blocks=64)
    world.engine.observe(ThroughputLog())
    with caplog.at_level(logging.INFO):
        world.submit("A", 20, max_tokens=18)
        world.run()
    assert [record.getMessage() for record in caplog.records] == [
        "prefilled 2.0 tokens/s, generated 0.8 tokens/s, running 1, waiting 0, KV cache 21.9 % used",
        "prefilled 0.0 tokens/s, generated 1.0 tokens/s, running 0, waiting 0, KV cache 0.0 % used",
    ]


def test_short_work_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    world = make_world(budget=8)
    world.engine.observe(ThroughputLog())
    with caplog.at_level(logging.INFO):
        for name in "ABCD":
            world.submit(name, 3, max_tokens=5)
            world.run()
            world.clock.now += 60
    assert caplog.records == []


def test_what_a_failed_step_was_to_compute_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Of A the 8 tokens of its first step, not those of its second; all of B."""
    broken = False

    def step_seconds(plan: StepPlan) -> float:  # noqa: ARG001
        if broken:
            raise RuntimeError("broken")
        return 1.0

    world = make_world(budget=8, max_running=1, num_blocks=64, step_seconds=step_seconds)
    world.engine.observe(ThroughputLog())
    with caplog.at_level(logging.INFO):
        world.submit("A", 20, max_tokens=1)
        world.submit("B", 8, max_tokens=12)
        world.step()
        broken = True
        world.step()
        broken = False
        world.run()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines[0].startswith("prefilled 1.6 tokens/s"), lines
