"""The log line: rates over some seconds of work, and silence otherwise."""

import logging

import pytest
from metrics_rig import make_world

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
