"""Who comes in, who has to go, and how often: admission, preemption by cost, deadlines."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import NoForesight, Rig, build_rig, expected_reply, made_up

from legato.core.admission import MAX_PREEMPTIONS
from legato.core.block_pool import BlockPool
from legato.core.events import FinishEvent, TokenEvent
from legato.core.invariants import check_state
from legato.core.lifecycle import FinishReason, Status
from legato.core.output_lengths import OutputLengthEstimator
from legato.core.preemption import DOUBLE_COST_CONTEXT, choose_victims, recompute_cost
from legato.core.prefill_policy import Chunked
from legato.core.request import Request, RequestId
from legato.core.schedule import Reason
from legato.core.sequence import Sequence
from legato.sampling_params import SamplingParams

# -- lengths of replies -----------------------------------------------------------------------------------


def test_before_any_reply_has_ended_the_guess_counts() -> None:
    assert OutputLengthEstimator(guess=128).remaining(0) == 128
    assert OutputLengthEstimator(guess=128).remaining(28) == 100


def test_the_mean_of_what_ended_replaces_the_guess() -> None:
    replies = OutputLengthEstimator(guess=1000)
    for _ in range(400):
        replies.observe(20)
    assert 20 <= replies.remaining(0) < 25
    assert replies.remaining(10) < 15


def test_a_reply_that_outlived_the_short_ones_is_compared_with_the_long_ones() -> None:
    replies = OutputLengthEstimator(guess=1)
    for _ in range(100):
        for length in (10, 10, 10, 500):
            replies.observe(length)
    assert 100 < replies.remaining(0) < 160
    assert replies.remaining(50) == pytest.approx(450, rel=0.05)
    assert replies.remaining(600) == 600, "longer than all: half done, as far as anyone knows"


def test_traffic_that_changes_is_followed() -> None:
    replies = OutputLengthEstimator(guess=10)
    for _ in range(200):
        replies.observe(1000)
    for _ in range(200):
        replies.observe(10)
    assert replies.remaining(0) < 50


@given(st.lists(st.integers(1, 5000), max_size=30), st.integers(0, 9000))
def test_at_least_one_token_is_always_expected(lengths: list[int], generated: int) -> None:
    replies = OutputLengthEstimator()
    for length in lengths:
        replies.observe(length)
    assert 1 <= replies.remaining(generated) <= max(*lengths, 128, generated, 1) if lengths else True


def test_only_replies_that_ended_by_their_own_rule_teach() -> None:
    rig = build_rig(output_lengths=OutputLengthEstimator(guess=50, weight=1.0))
    rig.add("aborted", 3, max_tokens=30)
    rig.step()
    rig.scheduler.abort(RequestId("aborted"))
    rig.add("failed", 3, max_tokens=30)
    rig.begin()
    rig.scheduler.fail("it broke")
    assert rig.scheduler.state.output_lengths.remaining(0) == 50
    rig.add("whole", 3, max_tokens=2)
    rig.run()
    assert rig.scheduler.state.output_lengths.remaining(0) < 50


# -- admission --------------------------------------------------------------------------------------------


def rig_with_lengths(length: int, **more: Any) -> Rig:
    """16 blocks of 4 tokens; replies are expected to be so long."""
    return build_rig(
        budget=64,
        num_blocks=16,
        block_size=4,
        output_lengths=OutputLengthEstimator(guess=length, weight=1e9),
        **more,
    )


@pytest.mark.parametrize(("length", "num"), [(1, 4), (5, 3), (17, 2), (60, 1)])
def test_as_many_start_as_are_expected_to_end(length: int, num: int) -> None:
    """Prompts of 16 tokens, 4 blocks; with the reply each needs 4, 5, 8, all 16."""
    rig = rig_with_lengths(length)
    for i in range(4):
        rig.add(f"r{i}", 16, max_tokens=48)
    assert len(rig.step().admitted) == num


def test_strict_admission_looks_at_the_most_that_may_be_asked_for() -> None:
    rig = rig_with_lengths(1, strict=True)
    for i in range(4):
        rig.add(f"r{i}", 16, max_tokens=17)
    assert len(rig.step().admitted) == 2
    rig.run()
    assert not any(schedule.preempted for schedule in rig.schedules)


def test_newcomers_leave_one_hundredth_of_the_pool_to_those_that_run() -> None:
    rig = build_rig(budget=2000, num_blocks=400, block_size=4, max_running=8, strict=True)
    rig.add("a", 396 * 4, max_tokens=1)
    rig.add("fits but for the watermark", 4, max_tokens=1)
    assert rig.step().admitted == ("a",)


def test_after_a_preemption_admission_is_careful_for_a_while() -> None:
    """The caution makes everyone's full need count, and fades."""
    rig = build_rig(budget=8, num_blocks=5, block_size=2, max_running=2)
    rig.add("A", 3, max_tokens=6)
    rig.add("B", 3, max_tokens=6)
    while not rig.step().preempted:
        pass
    assert rig.scheduler.state.caution == 1.0
    rig.add("C", 1, max_tokens=4)
    rig.run()
    careful = [schedule.step for schedule in rig.schedules if schedule.preempted]
    assert len(careful) == 1, "nothing was admitted only to be preempted again"
    assert rig.scheduler.state.caution < 1.0


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_two_long_requests_in_a_pool_for_one_and_a_half_both_finish(prefix_cache: bool) -> None:
    """D-05: chunks of 64; nobody restarts over and over, and what was computed is never undone by much."""
    rig = build_rig(
        budget=64,
        num_blocks=24,
        block_size=16,
        prefill_policy=Chunked(64),
        prefix_cache=prefix_cache,
        max_running=4,
    )
    for name in ("one", "two"):
        rig.add(name, 128, max_tokens=120)
    progress = [0]
    while rig.scheduler.state.has_work:
        rig.step()
        living = [*rig.scheduler.state.running.values(), *rig.scheduler.state.waiting.values()]
        progress.append(sum(sequence.num_known for sequence in living) + 248 * (2 - len(living)))
    assert progress == sorted(progress), "the most that was ever known only grows"
    preempted = [request_id for schedule in rig.schedules for request_id in schedule.preempted]
    assert 1 <= len(preempted) <= MAX_PREEMPTIONS
    for name in ("one", "two"):
        assert rig.tokens(name) == expected_reply(made_up(name, 128), 120)


class Amnesiac(NoForesight):
    """Never expects more than one token: the most preemptions that there can be."""

    def remaining(self, num_generated: int) -> float:  # noqa: ARG002
        return 1.0


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_pool_in_which_everyone_is_preempted_finishes_all_with_the_right_replies(
    prefix_cache: bool,
) -> None:
    """D-14: twice the load that fits, for long; each request is preempted a bounded number of times, and each
    output is that of a run alone. The most senior of a step is never the victim (the law checks it)."""
    rig = build_rig(
        budget=24,
        num_blocks=14,
        block_size=2,
        max_running=8,
        output_lengths=Amnesiac(),
        prefix_cache=prefix_cache,
    )
    requests = [rig.add(f"r{i}", 3 + i % 4, max_tokens=20) for i in range(40)]
    for _ in range(5000):
        if not rig.scheduler.state.has_work:
            break
        rig.step()
        rig.scheduler.state.caution = 0.0  # as careless as can be
    for request in requests:
        assert rig.tokens(request.id) == expected_reply(request.prompt, 20)
    lost = [request_id for schedule in rig.schedules for request_id in schedule.preempted]
    assert len(set(lost)) > 20
    assert max(lost.count(request_id) for request_id in set(lost)) <= MAX_PREEMPTIONS
    rig.assert_idle()


def test_who_was_preempted_often_comes_back_only_for_good() -> None:
    """The third preemption makes a guarantee: it waits until all that it can need is there."""
    rig = build_rig(budget=16, num_blocks=8, block_size=2, max_running=2, output_lengths=Amnesiac())
    rig.add("A", 3, max_tokens=12)
    rig.add("B", 3, max_tokens=12)
    rig.step()
    b = rig.scheduler.state.sequence(RequestId("B"))
    b.num_preemptions = MAX_PREEMPTIONS - 1
    while not rig.step().preempted:
        rig.scheduler.state.caution = 0.0
    assert b.guaranteed
    while b.status is Status.PREEMPTED:
        rig.scheduler.state.caution = 0.0
        rig.step()
    assert not rig.tokens("A")[12:], "A is at its end"
    assert len(rig.tokens("A")) == 12
    rig.run()
    assert b.num_preemptions == MAX_PREEMPTIONS


def test_an_empty_engine_admits_whatever_was_accepted() -> None:
    rig = build_rig(budget=8, num_blocks=4, block_size=4, strict=True)
    rig.add("all", 3, max_tokens=13)
    assert rig.step().admitted == ("all",)
    rig.run()
    rig.assert_idle()


# -- victims ----------------------------------------------------------------------------------------------


def running(pool: BlockPool, number: int, num_computed: int, **more: Any) -> Sequence:
    """A running sequence with one token left to compute, and the blocks for what it has computed."""
    request = Request(
        id=RequestId(f"r{number}"),
        prompt=(1,) * (num_computed + 1),
        params=SamplingParams(max_tokens=50),
        arrival=0.0,
        priority=more.pop("priority", 0),
    )
    sequence = Sequence(
        request, arrival_index=number, chain=[b""], guaranteed=False, arrival_step=0, arrival_virtual_time=0.0
    )
    blocks = pool.try_take(pool.blocks_for(num_computed))
    assert blocks is not None
    sequence.block_table, sequence.num_computed, sequence.status = blocks, num_computed, Status.RUNNING
    for name, value in more.items():
        setattr(sequence, name, value)
    return sequence


def victims(pool: BlockPool, *sequences: Sequence) -> list[int]:
    return [victim.arrival_index for victim in choose_victims(sequences, pool)]


@pytest.mark.parametrize(
    ("computed", "blocks", "taken", "tokens"),
    [(16, 4, 1, 4), (18, 5, 1, 2), (18, 5, 2, 6), (3, 4, 2, 3), (4, 4, 2, 0), (16, 4, 4, 16)],
)
def test_what_is_lost_with_some_tail_blocks(computed: int, blocks: int, taken: int, tokens: int) -> None:
    """Blocks of 4. The last cases: a prompt that was barely begun loses next to nothing."""
    pool = BlockPool(16, 4)
    sequence = running(pool, 0, computed)
    sequence.block_table = list(range(blocks))
    assert recompute_cost(sequence, taken, 4) == tokens * (1 + computed / DOUBLE_COST_CONTEXT)


def test_nobody_is_preempted_while_blocks_are_free() -> None:
    pool = BlockPool(5, 4)
    assert victims(pool, running(pool, 0, 8), running(pool, 1, 8)) == [1], "2 + 2 blocks, each needs one more"
    pool = BlockPool(6, 4)
    assert victims(pool, running(pool, 0, 8), running(pool, 1, 8)) == []


def test_the_victim_has_the_least_to_compute_again_for_each_block() -> None:
    """All need a block and none is free: of equal tails the one at the shorter context is cheaper, and a
    prompt that holds blocks not yet computed is the cheapest."""
    pool = BlockPool(11, 4)
    assert victims(pool, running(pool, 0, 4), running(pool, 1, 32), running(pool, 2, 8)) == [2]
    pool = BlockPool(14, 4)
    senior, long, short = running(pool, 0, 4), running(pool, 1, 32), running(pool, 2, 8)
    begun = running(pool, 3, 4)
    begun.block_table += pool.try_take(2) or []
    begun.tokens += [1] * 8
    assert victims(pool, senior, long, short, begun) == [3], "with its 3 blocks all others go on"


def test_who_was_preempted_before_is_dearer_and_who_is_urgent_goes_last() -> None:
    def chosen(**more: Any) -> int:
        pool = BlockPool(6, 4)
        others = running(pool, 1, 8), running(pool, 2, 8, **more)
        return victims(pool, running(pool, 0, 8), *others)[0]

    assert chosen() == 2, "of equals the youngest"
    assert chosen(num_preemptions=1) == 1
    assert chosen(num_preemptions=1, priority=1) == 2, "the less urgent class first"
    assert chosen(priority=-1) == 1, "r2 is the most senior then"
    assert chosen(guaranteed=True) == 1


def test_only_blocks_that_nobody_else_holds_are_gained() -> None:
    """`b` and `c` share all their blocks and need no more: preempting one of them alone frees nothing."""
    pool = BlockPool(6, 4)
    senior, d, b, c = (
        running(pool, number, computed) for number, computed in ((0, 8), (1, 8), (2, 7), (3, 0))
    )
    for i, block in enumerate(b.block_table):
        pool.register(block, bytes([i]))
    c.block_table, c.num_computed, c.tokens = list(b.block_table), 7, [1] * 8
    pool.share(b.block_table)
    assert victims(pool, senior, b, c, d) == [1]
    d.guaranteed = True
    assert sorted(victims(pool, senior, b, c, d)) == [0], "which frees enough, as only `d` is more senior"
    senior.guaranteed = True
    assert sorted(victims(pool, senior, b, c, d)) == [2, 3], "together they do"


def test_only_the_tail_of_a_victim_is_lost_when_that_is_enough() -> None:
    """One block is missing: of 5 computed blocks the victim finds 4 again when it comes back."""
    rig = build_rig(budget=32, num_blocks=10, block_size=2, max_running=2)
    a, b = rig.add("A", 9, max_tokens=6), rig.add("B", 9, max_tokens=4)
    while not rig.step().preempted:
        pass
    (lost,) = rig.schedules[-1].preempted
    assert lost == "B"
    computed = rig.scheduler.state.sequence(lost).num_known - 1
    found = len(rig.scheduler.state.find_prefix(rig.scheduler.state.sequence(lost)))
    assert found * 2 >= computed - 3, "the block that was taken, and the one computed in part"
    rig.run()
    for request in (a, b):
        assert rig.tokens(request.id) == expected_reply(request.prompt, request.params.max_tokens)


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("after", [0, 1, 3, 4, 5])
def test_a_preempted_reply_goes_on_as_if_nothing_had_happened(block_size: int, after: int) -> None:
    """E-14: preempted after 0, 1, block - 1, block .. tokens, three times each; penalties, seeds and usage
    see every token once, and the draw's index goes on."""
    rig = build_rig(budget=32, num_blocks=40, block_size=block_size)
    request = rig.add("A", 7, max_tokens=20, repetition_penalty=1.1)
    while len(rig.tokens("A")) < after or RequestId("A") not in rig.scheduler.state.running:
        rig.step()
    for _ in range(3):
        sequence = rig.scheduler.state.sequence(request.id)
        rig.scheduler._preempt(sequence)
        check_state(rig.scheduler.state)
        taken = rig.scheduler.state.pool.try_take(rig.scheduler.state.pool.num_free)  # overwrite what it had
        assert taken is not None
        rig.scheduler.state.pool.release(taken)
        step = rig.begin()
        while not step.sample:
            rig.finish(step)
            step = rig.begin()
        (row,) = step.sample
        assert row.num_generated == sequence.num_generated == len(row.generated)
        assert row.prompt == request.prompt
        rig.finish(step)
    rig.run()
    assert rig.tokens("A") == expected_reply(request.prompt, 20)
    assert sequence.num_cached == 0


# -- deadlines --------------------------------------------------------------------------------------------


def test_what_is_over_its_deadline_ends_before_any_work_is_done_for_it() -> None:
    rig = build_rig(budget=4, max_running=1)
    rig.add("running", 3, max_tokens=50, deadline=5.0)
    rig.add("waiting", 3, max_tokens=5, deadline=2.0)
    rig.add("patient", 3, max_tokens=5)
    rig.step()
    assert rig.scheduler.expire(1.9) == ()
    assert rig.scheduler.expire(2.0) == (FinishEvent(RequestId("waiting"), FinishReason.TIMEOUT),)
    rig.step()
    assert rig.scheduler.expire(9.0) == (FinishEvent(RequestId("running"), FinishReason.TIMEOUT),)
    check_state(rig.scheduler.state)
    rig.run()
    assert len(rig.tokens("patient")) == 5
    assert not rig.tokens("waiting")
    rig.assert_idle()


def test_a_deadline_of_an_ended_request_does_not_end_another_with_its_id() -> None:
    rig = build_rig()
    rig.add("A", 3, max_tokens=1, deadline=5.0)
    rig.run()
    rig.add("A", 3, max_tokens=2)
    assert rig.scheduler.expire(9.0) == ()
    rig.run()
    assert sum(isinstance(event, TokenEvent) for event in rig.events) == 3


def test_deadlines_of_ended_requests_are_not_kept_until_they_pass() -> None:
    rig = build_rig(num_blocks=200)
    rig.add("lives", 3, max_tokens=700, deadline=10.0)
    for i in range(500):
        rig.add(f"short{i}", 3, max_tokens=1, deadline=1e6)
        rig.step()
    assert len(rig.scheduler._deadlines._heap) < 200
    assert [event.request_id for event in rig.scheduler.expire(11.0)] == ["lives"]


def test_an_expired_request_is_not_the_most_urgent() -> None:
    """Nothing of the order depends on deadlines."""
    rig = build_rig(budget=4, max_running=1)
    rig.add("first", 3, max_tokens=2)
    rig.add("late", 3, max_tokens=2, deadline=0.5)
    assert rig.step().admitted == ("first",)
    assert rig.schedules[-1].queue_reason in (None, Reason.MAX_RUNNING)
