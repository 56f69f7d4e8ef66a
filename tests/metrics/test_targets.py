"""Targets in timelines, in the exported series, and in the log; numbers worked out by hand."""

import logging

import pytest
from metrics_rig import World, make_world

from legato.core.budget import TargetBudget
from legato.core.lifecycle import FinishReason
from legato.core.request import RequestId
from legato.core.step_plan import StepPlan
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepCost
from legato.metrics.target_log import TargetLog
from legato.metrics.timeline import RequestTimeline, Targets

SECOND = StepCost(step=1.0, head=0.0, decode=0.0, prefill=0.0, context=0.0, pair=0.0)


def tokens_as_seconds(plan: StepPlan) -> float:
    return float(plan.batch.num_tokens)


def timeline(token_times: list[float], targets: Targets, reason: FinishReason | None) -> RequestTimeline:
    return RequestTimeline(
        request_id=RequestId("r"),
        num_prompt=1,
        arrival=0.0,
        targets=targets,
        token_times=token_times,
        reason=reason,
    )


@pytest.mark.parametrize(
    ("num_gaps", "num_late", "met"), [(99, 0, True), (99, 1, False), (100, 1, True), (199, 2, False)]
)
def test_one_gap_in_a_hundred_may_be_late(num_gaps: int, num_late: int, met: bool) -> None:
    times = [1.0]
    for i in range(num_gaps):
        times.append(times[-1] + (3.0 if i < num_late else 2.0))
    reply = timeline(times, Targets(tpot=2.0), FinishReason.STOP)
    assert (reply.met_tpot, reply.met_targets) == (met, met)


@pytest.mark.parametrize(
    ("targets", "reason", "met"),
    [
        (Targets(), FinishReason.STOP, None),
        (Targets(ttft=1.0), FinishReason.STOP, True),
        (Targets(ttft=0.5), FinishReason.LENGTH, False),
        (Targets(ttft=1.0, tpot=1.0), FinishReason.LENGTH, False),
        (Targets(ttft=0.5, tpot=2.0), FinishReason.LENGTH, False),
        (Targets(ttft=1.0, tpot=2.0), FinishReason.LENGTH, True),
        (Targets(ttft=1.0), FinishReason.ABORT, None),
        (Targets(ttft=1.0), FinishReason.TIMEOUT, False),
        (Targets(ttft=1.0), FinishReason.ERROR, False),
        (Targets(ttft=1.0), None, None),
    ],
)
def test_a_request_meets_its_targets_if_it_is_complete_and_missed_none(
    targets: Targets, reason: FinishReason | None, met: bool | None
) -> None:
    """TTFT is 1 s, the one gap 2 s."""
    assert timeline([1.0, 3.0], targets, reason).met_targets is met


def test_what_has_no_gap_meets_a_target_for_gaps() -> None:
    reply = timeline([1.0], Targets(tpot=0.001), FinishReason.STOP)
    assert (reply.met_tpot, reply.met_targets) == (None, True)


def counts(world: World, target: str) -> tuple[float, float]:
    """Samples, and those of them that missed."""
    return (
        world.sample("legato_target_samples_total", target=target),
        world.sample("legato_target_missed_total", target=target),
    )


def test_misses_are_counted_by_the_servers_targets_and_by_a_requests_own() -> None:
    """Steps take a second for each token: tokens of `a` at 2, 9, 10, 11; of `b`, with looser ones, at 9."""
    world = make_world(budget=8, step_seconds=tokens_as_seconds, targets=Targets(ttft=2.0, tpot=3.0))
    world.submit("a", num_prompt=2, max_tokens=4)
    world.step()
    world.submit("b", num_prompt=7, max_tokens=1, ttft_target=7.5)
    world.submit("c", num_prompt=7, max_tokens=1)
    world.abort("c")
    world.run()
    assert world.tokens["a"] == [2, 10, 11, 12]
    assert counts(world, "ttft") == (2, 1)  # b: 8 s
    assert counts(world, "tpot") == (3, 1)
    assert counts(world, "request") == (2, 2)
    assert world.sample("legato_target_seconds", target="tpot") == 3.0
    assert world.sample("vllm:inter_token_latency_seconds_bucket", le="3.0") == 2
    assert world.sample("vllm:time_to_first_token_seconds_bucket", le="2.0") == 1


def test_without_targets_nothing_is_judged_and_the_series_are_there() -> None:
    world = make_world()
    world.submit("a", num_prompt=2, max_tokens=3)
    world.run()
    assert [counts(world, target) for target in ("ttft", "tpot", "request")] == [(0, 0)] * 3
    page = world.metrics.render().decode()
    assert "legato_target_seconds{" not in page
    assert world.sample("legato_steps_total", limit="tokens") == 3
    assert "legato_step_prediction_error{" not in page


def test_steps_are_counted_by_limit_and_predictions_by_their_error() -> None:
    """A step is believed to take 1 s and takes 2: its error is 1."""
    costs = CostModel(prior=SECOND)
    budget = TargetBudget(8, costs, target=0.5, min_chunk=2)
    world = make_world(budget=8, timed=budget, step_seconds=lambda _: 2.0, targets=Targets(tpot=0.5))
    world.submit("a", num_prompt=2, max_tokens=4)
    world.step()
    assert world.sample("legato_step_prediction_error", share="0.9") == pytest.approx(1.0)
    assert world.sample("legato_target_unreachable") == 0
    world.step()
    assert world.sample("legato_target_unreachable") == 1
    world.run()
    assert world.sample("legato_steps_total", limit="tokens") == 1
    assert world.sample("legato_steps_total", limit="unreachable") == 3
    assert world.sample("legato_step_margin") == costs.margin
    assert world.sample("legato_step_prediction_error", share="0.5") <= 1.0


def test_an_unreachable_target_is_logged_once_and_so_is_its_return(caplog: pytest.LogCaptureFixture) -> None:
    """Decodes take 1 s; the target is 2 s for most requests, and half a second for the strict one."""
    budget = TargetBudget(8, CostModel(prior=SECOND), target=2.0)
    world = make_world(budget=8, num_blocks=200, timed=budget)
    world.engine.observe(TargetLog())
    with caplog.at_level(logging.INFO):
        world.submit("strict", num_prompt=1, max_tokens=40, tpot_target=0.5)
        world.submit("other", num_prompt=1, max_tokens=300)
        world.run()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "2 decodes take 1000.0 ms, target 500.0 ms: no budget can keep it; "
            "fewer at once (max_running) or a looser target would",
        ),
        ("INFO", "1 decodes take 1000.0 ms, target 2000.0 ms: it is within reach again"),
    ]


def test_a_target_that_comes_and_goes_is_logged_at_most_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = make_world(budget=8, timed=TargetBudget(8, CostModel(prior=SECOND), target=2.0))
    world.engine.observe(TargetLog())
    with caplog.at_level(logging.INFO):
        for i in range(60):  # three steps each: a strict one, then another
            world.submit(f"r{i}", num_prompt=1, max_tokens=3, tpot_target=0.5 if i % 2 else None)
            world.run()
    assert world.clock.now == 180
    assert 2 <= len(caplog.records) <= 4
