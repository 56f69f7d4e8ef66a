"""Timelines of real engine histories against numbers worked out by hand."""

import pytest
from metrics_rig import World, make_world

from legato.core.lifecycle import FinishReason
from legato.core.prefill_policy import Chunked
from legato.core.request import RequestId
from legato.core.step_plan import StepPlan
from legato.metrics.timeline import RequestTimeline


def assert_nothing_left(world: World) -> None:
    timelines = world.watcher.timelines
    assert (timelines.num_running, timelines.num_waiting) == (0, 0)
    assert world.engine.scheduler.state.pool.num_used == 0


def test_a_prompt_of_three_chunks_gets_one_ttft_and_the_formulas_of_its_stamps() -> None:
    world = make_world(budget=4)
    world.clock.now = 2.0
    world.submit("r", num_prompt=10, max_tokens=3)
    world.clock.now = 5.0  # three seconds in the queue, then chunks of 4, 4, 2
    world.run()
    r = world.watcher.finished["r"]
    assert (r.arrival, r.admitted, r.finished, r.reason) == (2.0, 5.0, 10.0, FinishReason.LENGTH)
    assert r.token_times == world.tokens["r"] == [8.0, 9.0, 10.0]
    assert (r.first_token, r.last_token) == (8.0, 10.0)
    assert (r.num_prompt, r.num_generated, r.num_chunks, r.num_preemptions) == (10, 3, 3, 0)
    assert (r.queue_time, r.prefill_time, r.decode_time) == (3.0, 3.0, 2.0)
    assert (r.ttft, r.itl, r.tpot, r.e2e) == (6.0, (1.0, 1.0), 1.0, 8.0)
    assert_nothing_left(world)


def test_tpot_is_the_mean_gap_and_itl_shows_the_stall() -> None:
    world = make_world(budget=8, step_seconds=lambda plan: float(plan.batch.num_tokens))
    world.submit("r", num_prompt=1, max_tokens=3)
    world.step()  # 1 token: ends at 1
    world.submit("long", num_prompt=7, max_tokens=1)
    world.run()  # decode and chunk, 8 tokens: ends at 9; decode: ends at 10
    r, long = world.watcher.finished["r"], world.watcher.finished["long"]
    assert (r.itl, r.tpot) == ((8.0, 1.0), 4.5)
    assert (long.ttft, long.itl) == (8.0, ())


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_tpot_of_less_than_two_tokens_is_not_a_number(num_tokens: int) -> None:
    r = RequestTimeline(request_id=RequestId("r"), num_prompt=1, arrival=0.0, token_times=[1.0] * num_tokens)
    assert r.tpot is None
    assert r.itl == ()


def test_a_request_that_never_ran_has_no_times() -> None:
    r = RequestTimeline(request_id=RequestId("r"), num_prompt=1, arrival=0.0)
    assert (r.ttft, r.e2e, r.queue_time, r.prefill_time, r.decode_time) == (None,) * 5


def test_a_prompt_token_left_over_counts_as_a_step_on_the_prompt() -> None:
    world = make_world(budget=4)
    world.submit("r", num_prompt=5, max_tokens=1)  # a chunk of 4, then one token as a decode
    world.run()
    assert world.watcher.finished["r"].num_chunks == 2


def test_preemption_after_three_tokens_keeps_every_stamp() -> None:
    """6 blocks of 2 tokens; both prompts take 2 blocks, then 3, and the fourth of `a` is taken from `b`.

    a: tokens at 1 2 3 4 5. b: tokens at 1 2 3, waiting while a ends. Of its 6 computed tokens `a` took
    only the last block, so the step from 5 to 6 computes 3 of the 7 known ones, and 2 of these again.
    """
    world = make_world(budget=8, num_blocks=6)
    world.submit("a", num_prompt=4, max_tokens=5)
    world.submit("b", num_prompt=4, max_tokens=5)
    world.run()
    a, b = world.watcher.finished["a"], world.watcher.finished["b"]
    assert a.token_times == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert b.token_times == [1.0, 2.0, 3.0, 6.0, 7.0]
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    assert (b.admitted, b.ttft, b.itl, b.tpot, b.e2e) == (0.0, 1.0, (1.0, 1.0, 3.0, 1.0), 1.5, 7.0)
    assert b.num_chunks == 1
    assert sum(changes.recomputed for changes in world.watcher.changes) == 2
    assert_nothing_left(world)


def test_preemption_before_the_first_token_leaves_queue_time_and_makes_ttft_longer() -> None:
    """Chunks of 2. `a` needs its fourth block in step 6, when `b` has computed 10 of its 12 prompt tokens.

    `b` comes back in step 8 and finds them computed still: its first token is there at 8.
    """
    world = make_world(budget=4, num_blocks=9, policy=Chunked(2))
    world.submit("a", num_prompt=2, max_tokens=7)
    world.submit("b", num_prompt=12, max_tokens=2)
    world.run()
    b = world.watcher.finished["b"]
    assert world.watcher.finished["a"].finished == 7.0
    assert b.token_times == world.tokens["b"] == [8.0, 9.0]
    assert (b.queue_time, b.prefill_time, b.ttft, b.e2e) == (0.0, 8.0, 8.0, 9.0)
    assert (b.num_preemptions, b.num_chunks) == (1, 6)
    assert sum(changes.recomputed for changes in world.watcher.changes) == 0
    assert sum(timeline is b for changes in world.watcher.changes for timeline in changes.admitted) == 1


@pytest.mark.parametrize(
    ("steps", "state", "num_generated"),
    [(0, "waiting", 0), (1, "prefill", 0), (4, "decode", 1), (5, "preempted", 1)],
)
def test_an_abort_in_every_state_ends_the_timeline_and_leaves_nothing(
    steps: int, state: str, num_generated: int
) -> None:
    """7 blocks of 2, chunks of 2. `a` holds one block at first, and one more from step 2 and from step 4 on.

    `b` holds 4 for its prompt, has its first token at the end of step 4, and finds no fifth block in step 5.
    """
    world = make_world(budget=4, num_blocks=7, policy=Chunked(2))
    world.submit("a", num_prompt=2, max_tokens=8)
    world.submit("b", num_prompt=8, max_tokens=3)
    world.step(steps)
    scheduler = world.engine.scheduler
    b = scheduler.state.sequence(RequestId("b"))
    assert b.status.value == {"waiting": "waiting", "preempted": "preempted"}.get(state, "running")
    world.abort("b")
    timeline = world.watcher.finished["b"]
    assert (timeline.reason, timeline.finished) == (FinishReason.ABORT, float(steps))
    assert timeline.num_generated == num_generated
    assert (timeline.admitted is None) == (state == "waiting")
    world.run()
    assert_nothing_left(world)


def test_a_stop_string_ends_a_timeline_when_the_engine_is_told() -> None:
    world = make_world()
    world.submit("r", num_prompt=4, max_tokens=9)
    world.step(3)
    world.clock.now += 0.5
    world.abort("r", FinishReason.STOP)
    r = world.watcher.finished["r"]
    assert (r.reason, r.last_token, r.finished, r.e2e, r.tpot) == (FinishReason.STOP, 3.0, 3.5, 3.5, 1.0)


def test_a_failed_step_ends_those_in_it_and_computes_nothing() -> None:
    def fails_at_the_second_step(_: StepPlan) -> float:
        if world.engine.scheduler.state.step == 2:
            raise RuntimeError("broken")
        return 1.0

    world = make_world(budget=4, max_running=1, step_seconds=fails_at_the_second_step)
    world.submit("lost", num_prompt=6, max_tokens=2)
    world.submit("next", num_prompt=2, max_tokens=1)
    world.run()
    lost, following = world.watcher.finished["lost"], world.watcher.finished["next"]
    assert (lost.reason, lost.num_computed, lost.num_chunks, lost.finished) == (FinishReason.ERROR, 4, 1, 1.0)
    assert (following.reason, following.token_times) == (FinishReason.LENGTH, [2.0])
    assert_nothing_left(world)


def test_an_abort_while_its_step_is_in_flight_is_not_brought_back_by_the_record() -> None:
    def aborts_in_the_second_step(_: StepPlan) -> float:
        if world.engine.scheduler.state.step == 2:
            world.abort("r")
        return 1.0

    world = make_world(step_seconds=aborts_in_the_second_step)
    world.submit("r", num_prompt=2, max_tokens=5)
    world.submit("other", num_prompt=2, max_tokens=2)
    world.run()
    assert world.watcher.finished["r"].token_times == [1.0]
    assert world.watcher.finished["other"].token_times == [1.0, 2.0]
    assert_nothing_left(world)


def test_an_abort_of_an_unknown_or_ended_request_changes_nothing() -> None:
    world = make_world()
    world.submit("r", num_prompt=2, max_tokens=1)
    world.run()
    for name in ("r", "never"):
        assert world.watcher.timelines.aborted(RequestId(name), FinishReason.ABORT, 9.0) is None
    assert world.watcher.finished["r"].finished == 1.0


def test_an_id_may_be_used_again_after_its_request_ended() -> None:
    world = make_world()
    for start in (0.0, 1.0):
        world.submit("r", num_prompt=2, max_tokens=1)
        world.run()
        assert world.watcher.finished["r"].arrival == start
        assert world.watcher.finished["r"].ttft == 1.0
