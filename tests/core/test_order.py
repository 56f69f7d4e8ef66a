"""Who comes first: the policies, and the bounds that hold under all of them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import Rig, build_rig, expected_reply

from legato.core.prefill_policy import Chunked, FillBudget, PrefillPolicy, WholePrompt
from legato.core.prompt_order import MAX_OVERTAKEN, OVERDUE_STEPS
from legato.core.request import Request, RequestId
from legato.core.schedule import Reason
from legato.core.scheduling_policy import (
    SCHEDULING_POLICIES,
    Fair,
    Fcfs,
    Priority,
    SchedulingPolicy,
    Shortest,
)
from legato.core.sequence import Sequence
from legato.core.waiting_queue import WaitingQueue
from legato.sampling_params import SamplingParams

ALL = pytest.mark.parametrize(
    "order", [Fcfs(), Fair(), Shortest(1.0), Priority()], ids=lambda o: type(o).__name__
)


def first_token_step(rig: Rig, name: str) -> int:
    """Steps from now until the request's first token."""
    for count in range(1, 10_000):
        rig.step()
        if rig.tokens(name):
            return count
    raise AssertionError("no token")


def distinct(number: int, num: int) -> list[int]:
    """A prompt that shares no block with those of other numbers below 10,000."""
    return [number % 100, number // 100, *[7] * num][:num]


def test_distinct_prompts_are() -> None:
    assert len({tuple(distinct(i, 8)[:4]) for i in range(10_000)}) == 10_000


def a_sequence(
    number: int, size: int, *, entry: float = 0.0, priority: int = 0, preempted: int = 0
) -> Sequence:
    request = Request(
        id=RequestId(f"r{number}"),
        prompt=(1,) * size,
        params=SamplingParams(max_tokens=1),
        arrival=0.0,
        priority=priority,
    )
    sequence = Sequence(
        request,
        arrival_index=number,
        chain=[b""],
        guaranteed=False,
        arrival_step=int(entry),
        arrival_virtual_time=entry,
        num_uncached_at_arrival=size,
    )
    sequence.num_preemptions = preempted
    return sequence


# -- the orders as such -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "first", "then"),
    [
        (Fcfs(), a_sequence(1, 900), a_sequence(2, 1)),
        (Fcfs(), a_sequence(2, 1, preempted=1), a_sequence(1, 1)),
        (Fair(), a_sequence(2, 10), a_sequence(1, 900)),
        (Fair(), a_sequence(1, 900), a_sequence(2, 10, entry=891)),
        (Fair(), a_sequence(2, 900, preempted=1), a_sequence(1, 1)),
        (Shortest(10.0), a_sequence(2, 10), a_sequence(1, 11)),
        (Shortest(10.0), a_sequence(1, 110), a_sequence(2, 20, entry=10)),
        (Shortest(10.0), a_sequence(2, 900, preempted=1), a_sequence(1, 1)),
        (Priority(), a_sequence(2, 900, priority=-1), a_sequence(1, 1)),
        (Priority(), a_sequence(1, 900), a_sequence(2, 1)),
        (Priority(), a_sequence(2, 1, priority=-1), a_sequence(1, 1, preempted=1)),
        (Priority(), a_sequence(2, 1, preempted=1), a_sequence(1, 1)),
    ],
)
def test_the_order_of_two(order: SchedulingPolicy, first: Sequence, then: Sequence) -> None:
    assert order.key(first) < order.key(then)


def test_every_policy_of_the_settings_is_made_for_a_budget() -> None:
    assert [type(make(64)).__name__.lower() for make in SCHEDULING_POLICIES.values()] == list(
        SCHEDULING_POLICIES
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(-2, 2)), max_size=20), st.data())
def test_the_queue_is_always_sorted(kinds: list[tuple[int, int]], data: st.DataObject) -> None:
    order = data.draw(st.sampled_from([Fcfs(), Fair(), Shortest(1.0), Priority()]))
    queue, inside = WaitingQueue(order), {}
    for number, (size, priority) in enumerate(kinds):
        sequence = a_sequence(number, size, priority=priority)
        queue.add(sequence)
        inside[sequence.id] = sequence
        if data.draw(st.booleans()):
            left = data.draw(st.sampled_from(sorted(inside)))
            assert queue.remove(left) is inside.pop(left)
        assert list(queue.values()) == sorted(inside.values(), key=order.key)
        assert [s for _, s in queue.head(3)] == list(queue.values())[:3]
        assert len(queue) == len(inside)
        assert all(request_id in queue for request_id in inside)
    with pytest.raises(KeyError):
        queue.remove(RequestId("nobody"))


# -- fairness, in steps -----------------------------------------------------------------------------------


def chatter_beside_a_paster(order: SchedulingPolicy, num_prompt: int, arrives: int) -> int:
    """Steps to the first token of a chat prompt that comes after ten prompts of 2,000 tokens."""
    rig = build_rig(budget=256, max_running=16, num_blocks=2000, block_size=32, policy=order)
    for i in range(10):
        rig.add(f"paste{i}", distinct(i, 2000), max_tokens=20)
    for _ in range(arrives):
        rig.step()
    rig.add("chat", distinct(50, num_prompt), max_tokens=20)
    return first_token_step(rig, "chat")


@pytest.mark.parametrize(("num_prompt", "arrives"), [(20, 1), (100, 1), (100, 40), (300, 1), (600, 30)])
def test_a_chatter_beside_ten_pasted_prompts_is_answered_as_if_alone(num_prompt: int, arrives: int) -> None:
    """At most 1.5 times the steps that it takes alone; first come, first served makes it wait for all ten."""
    alone = -(-num_prompt // 256)
    fair = chatter_beside_a_paster(Fair(), num_prompt, arrives)
    fcfs = chatter_beside_a_paster(Fcfs(), num_prompt, arrives)
    assert fair <= 1.5 * alone
    assert fcfs >= (20_000 - 256 * arrives) / 256 - 10


def test_a_short_prompt_is_answered_at_once_beside_three_giants_which_all_get_on() -> None:
    """D-09: prompts of 50 budgets; the short one's first token comes in its first step."""
    rig = build_rig(budget=16, num_blocks=1000, block_size=16, max_running=8, policy=Fair())
    for i in range(3):
        rig.add(f"giant{i}", distinct(i, 800), max_tokens=1)
    rig.step()
    rig.step()
    rig.add("short", distinct(50, 8), max_tokens=1)
    assert first_token_step(rig, "short") == 1
    rig.run()
    for i in range(3):
        assert rig.tokens(f"giant{i}") == expected_reply(distinct(i, 800), 1)


def test_a_giant_gets_on_under_a_stream_of_short_prompts() -> None:
    """D-09: in every step one prompt comes that could take the whole of it; the giant's longest pause is
    bounded, and it ends as soon as it would if all shared every step equally."""
    rig = build_rig(budget=16, num_blocks=400, block_size=4, max_running=8, policy=Fair())
    rig.add("giant", distinct(0, 320), max_tokens=1)
    rig.step()
    pause = longest = 0
    for i in range(400):
        rig.add(f"s{i}", distinct(i + 1, 15), max_tokens=1)
        schedule = rig.step()
        served = any(run.request_id == "giant" for run in schedule.runs)
        pause = 0 if served else pause + 1
        longest = max(longest, pause)
        if rig.tokens("giant"):
            break
    assert longest <= OVERDUE_STEPS + 1
    assert i <= 2 * 320 / 8, "half of each step is its equal share"


def test_no_prompt_is_later_than_under_equal_shares_by_more_than_a_few_steps() -> None:
    """Fair queueing against a fluid model: every prompt gets an equal share of every step's 16 tokens."""
    sizes, gap, budget = [200, 30, 90, 400, 10, 60, 120, 35], 3, 16
    rig = build_rig(budget=budget, num_blocks=1000, block_size=4, max_running=16, policy=Fair())
    left: dict[str, float] = {}
    fluid: dict[str, int] = {}
    done: dict[str, int] = {}
    for step in range(200):
        if step % gap == 0 and step // gap < len(sizes):
            name = f"r{step // gap}"
            rig.add(name, distinct(step, sizes[step // gap]), max_tokens=1)
            left[name] = sizes[step // gap]
        if rig.scheduler.state.has_work:
            rig.step()
        done |= {event.request_id: step for event in rig.events[len(done) :]}
        share = budget / len(left) if left else 0.0
        left = {name: rest - share for name, rest in left.items()}
        fluid |= {name: step for name, rest in left.items() if rest <= 0}
        left = {name: rest for name, rest in left.items() if rest > 0}
    assert done.keys() == fluid.keys()
    assert all(done[name] <= fluid[name] + 2 for name in done), (done, fluid)
    assert sum(done.values()) < 0.8 * sum(fluid.values()), "and most are much earlier"


@ALL
def test_a_started_prompt_is_never_forgotten(order: SchedulingPolicy) -> None:
    """Whatever comes before it in the order, it gets tokens within a bounded number of steps."""
    rig = build_rig(
        budget=8, num_blocks=200, block_size=4, max_running=6, policy=order, prefill_policy=FillBudget()
    )
    rig.add("slow", distinct(0, 120), max_tokens=1, priority=9)
    rig.step()
    pause = longest = 0
    for i in range(300):
        rig.add(f"u{i}", distinct(i + 1, 8), max_tokens=1, priority=-1)
        served = any(run.request_id == "slow" for run in rig.step().runs)
        pause = 0 if served else pause + 1
        longest = max(longest, pause)
        if rig.tokens("slow"):
            break
    assert longest <= OVERDUE_STEPS + 1
    assert rig.tokens("slow")


# -- what overtakes what ----------------------------------------------------------------------------------


@ALL
def test_light_prompts_pass_a_heavy_one_that_lacks_blocks_but_not_for_ever(order: SchedulingPolicy) -> None:
    """D-04: light ones overtake in the same step; under a constant stream of them the heavy one starts."""
    rig = build_rig(budget=64, num_blocks=100, block_size=4, max_running=64, policy=order)
    rig.add("running", distinct(0, 200), max_tokens=160)
    while not rig.tokens("running"):
        rig.step()
    rig.add("heavy", distinct(1, 300), max_tokens=2)
    light_waits = []
    for i in range(3 * MAX_OVERTAKEN):
        rig.add(f"light{i}", distinct(i + 2, 8), max_tokens=3)
        schedule = rig.step()
        light_waits.append(RequestId(f"light{i}") not in schedule.admitted)
        if "heavy" in schedule.reasons and not light_waits[-1]:
            assert schedule.reasons[RequestId("heavy")] is Reason.BLOCKS
    assert not any(light_waits[: MAX_OVERTAKEN // 2]), "light ones that fit start at once"
    heavy = rig.scheduler.state.sequence(RequestId("heavy")) if not rig.tokens("heavy") else None
    assert heavy is None or heavy.num_overtaken <= MAX_OVERTAKEN + 1
    steps = 0
    while not rig.tokens("heavy"):
        rig.add(f"more{steps}", distinct(1000 + steps, 8), max_tokens=3)
        rig.step()
        steps += 1
        assert steps < 200, "the heavy one starves"
    rig.run()
    rig.assert_idle()


@ALL
def test_a_heavy_prompt_starts_though_light_ones_take_every_block_that_is_freed(
    order: SchedulingPolicy,
) -> None:
    """D-04: in every step one more comes, and ten of them fill the pool for 30 steps. The bound: in
    192 steps the heavy one has aged by the 192 tokens that it is longer; those that came meanwhile go first,
    and so many more overtake it, one in 4 steps; those that run come to their end."""
    rig = build_rig(budget=64, num_blocks=100, block_size=4, max_running=64, policy=order, strict=True)
    for i in range(10):
        rig.add(f"first{i}", distinct(i, 8), max_tokens=30)
        rig.step()
    rig.add("heavy", distinct(50, 200), max_tokens=2)
    for i in range(4 * (192 + MAX_OVERTAKEN) + 60):
        rig.add(f"light{i}", distinct(100 + i, 8), max_tokens=30)
        rig.step()
        if rig.tokens("heavy"):
            return
    raise AssertionError("the heavy one starves")


@ALL
@pytest.mark.parametrize(
    ("policy", "num_prompt", "num_light"),
    [(WholePrompt(), 40, 4), (Chunked(4), 130, 28)],
    ids=["whole", "partial"],
)
def test_a_prompt_starts_that_others_never_leave_room_for(
    order: SchedulingPolicy, policy: PrefillPolicy, num_prompt: int, num_light: int
) -> None:
    """One is longer than a step may be beside others, one takes over half of the pool; light ones run in
    every step."""
    limits = {"budget": 16, "num_blocks": 60, "max_running": 8, "prefix_cache": False}
    rig = build_rig(**limits, policy=order, prefill_policy=policy)
    rig.add("light", distinct(0, num_light), max_tokens=5)
    rig.step()
    rig.add("heavy", distinct(1, num_prompt), max_tokens=1)
    for i in range(3 * (num_prompt + MAX_OVERTAKEN) + 60):
        if i % 3 == 0:
            rig.add(f"light{i}", distinct(i + 2, num_light), max_tokens=5)
        rig.step()
        if rig.tokens("heavy"):
            return
    raise AssertionError("the heavy one starves")


def test_the_first_of_the_queue_starts_though_short_prompts_take_every_place_that_is_left() -> None:
    """One may run. In each step a short one ends within the share kept for it, and takes the place."""
    rig = build_rig(budget=16, max_running=1, policy=Fair(), prefix_cache=False)
    rig.add("long", distinct(0, 20), max_tokens=1)
    for i in range(2 * MAX_OVERTAKEN):
        rig.scheduler.state.virtual_time += 100  # the long one is first
        rig.add(f"short{i}", distinct(i + 1, 8), max_tokens=1)
        schedule = rig.step()
        if rig.tokens("long"):
            return
        assert (
            RequestId("long") in rig.scheduler.state.running or schedule.reasons["long"] is Reason.MAX_RUNNING
        )
    raise AssertionError("the long one starves")


def test_the_first_in_the_order_gets_on_though_short_prompts_leave_only_crumbs() -> None:
    """Half of 40 tokens for a prompt of 10 leaves 30: too little for a chunk, in every step anew."""
    rig = build_rig(budget=40, num_blocks=400, policy=Fair(), min_chunk=32, prefix_cache=False)
    rig.add("long", distinct(0, 300), max_tokens=1)
    for i in range(200):
        rig.add(f"short{i}", distinct(i + 1, 10), max_tokens=1)
        rig.step()
        if rig.tokens("long"):
            return
    raise AssertionError("the long one starves")


def test_a_share_of_each_step_is_kept_for_prompts_that_end_in_it() -> None:
    """A giant that was preempted before comes first in every order; a short prompt still ends at once."""
    rig = build_rig(budget=16, num_blocks=200, block_size=4, policy=Fair())
    rig.add("giant", distinct(0, 320), max_tokens=1)
    rig.step()
    rig.scheduler.state.sequence(RequestId("giant")).num_preemptions = 1
    rig.add("short", distinct(1, 8), max_tokens=1)
    rig.add("longer than the share", distinct(2, 9), max_tokens=1)
    schedule = rig.step()
    assert [(run.request_id, run.length) for run in schedule.chunks] == [("short", 8), ("giant", 8)]


def test_whole_prompts_come_in_their_order_and_leave_no_step_half_empty() -> None:
    """Short ones of 6 tokens that came later end within half of a step; first they would leave too little for
    the one of 12, whose turn it is."""
    rig = build_rig(
        budget=16, num_blocks=200, policy=Fair(), prefill_policy=WholePrompt(), prefix_cache=False
    )
    rig.add("first", distinct(0, 12), max_tokens=1)
    rig.scheduler.state.virtual_time += 100
    rig.add("short", distinct(1, 6), max_tokens=1)
    assert [run.request_id for run in rig.step().chunks] == ["first"]
    assert [run.request_id for run in rig.step().chunks] == ["short"]


def test_four_cold_prompts_of_many_chunks_all_run_as_soon_as_they_are_computed() -> None:
    """D-07: no fullness is remembered: all four run within the time that their prompts take."""
    rig = build_rig(budget=16, num_blocks=64, block_size=4, max_running=4, policy=Fair())
    for i in range(4):
        rig.add(f"r{i}", distinct(i, 40), max_tokens=20)
    for _ in range(-(-160 // 13) + 1):
        rig.step()
    assert len(rig.scheduler.state.running) == 4
    assert all(sequence.num_remaining == 1 for sequence in rig.scheduler.state.running.values())


def test_a_batch_is_as_large_as_the_sum_of_its_parts() -> None:
    """D-16: prompts of 10, 10 and 1,000 tokens fit in a step of 1,100."""
    rig = build_rig(budget=1100, num_blocks=400, block_size=4)
    for i, num in enumerate((10, 10, 1000)):
        rig.add(f"r{i}", distinct(i, num), max_tokens=1)
    schedule = rig.step()
    assert (len(schedule.chunks), schedule.num_tokens) == (3, 1020)
    assert all(chunk.is_last for chunk in schedule.chunks)


def test_a_request_that_was_preempted_comes_before_one_that_never_ran() -> None:
    """D-19: under priorities too, within its class; its end is bounded by those that run."""
    rig = build_rig(budget=8, num_blocks=5, block_size=2, max_running=2, policy=Priority())
    rig.add("senior", (1, 2, 3), max_tokens=6, priority=0)
    rig.add("A", (4, 5, 6), max_tokens=6, priority=0)
    rig.add("B", (7,), max_tokens=2, priority=0)
    while not rig.step().preempted:
        pass
    assert list(rig.scheduler.state.waiting) == ["A", "B"]
    rig.add("urgent", (8,), max_tokens=2, priority=-1)
    assert list(rig.scheduler.state.waiting) == ["urgent", "A", "B"]
    rig.run()
    admitted = [request_id for schedule in rig.schedules for request_id in schedule.admitted]
    assert admitted == ["senior", "A", "urgent", "A", "B"]


# -- crumbs and partial prompts ---------------------------------------------------------------------------


def test_what_is_left_of_a_step_makes_no_crumbs_but_may_end_a_prompt() -> None:
    rig = build_rig(budget=16, min_chunk=6, num_blocks=64)
    rig.add("a", distinct(0, 12), max_tokens=1)
    rig.add("b", distinct(1, 30), max_tokens=1)
    rig.add("c", distinct(2, 4), max_tokens=1)
    schedule = rig.step()
    assert [(run.request_id, run.length) for run in schedule.chunks] == [("a", 12), ("c", 4)]
    assert schedule.reasons == {RequestId("b"): Reason.MIN_CHUNK}


def test_the_first_chunk_of_a_step_takes_what_there_is() -> None:
    """Decodes leave 2 of 6 tokens in every step: the prompt goes on with these."""
    rig = build_rig(budget=6, min_chunk=6, num_blocks=64, max_running=5)
    for i in range(4):
        rig.add(f"d{i}", distinct(i, 1), max_tokens=30)
    rig.step()
    rig.add("p", distinct(9, 20), max_tokens=1)
    assert [run.length for run in rig.step().chunks] == [2]


def test_a_chunk_that_the_policy_makes_short_is_no_crumb() -> None:
    rig = build_rig(budget=16, min_chunk=6, prefill_policy=Chunked(4))
    for i in range(3):
        rig.add(f"r{i}", distinct(i, 20), max_tokens=1)
    assert [run.length for run in rig.step().chunks] == [4, 4, 4]


def test_prompts_computed_in_part_hold_at_most_half_of_the_pool() -> None:
    rig = build_rig(budget=16, num_blocks=32, block_size=4, prefill_policy=Chunked(4))
    for i in range(4):
        rig.add(f"r{i}", distinct(i, 28), max_tokens=1)  # 7 blocks each
    schedule = rig.step()
    assert len(schedule.admitted) == 2
    assert schedule.reasons == dict.fromkeys((RequestId("r2"), RequestId("r3")), Reason.PARTIAL)


def test_one_prompt_may_always_be_computed_in_part() -> None:
    rig = build_rig(budget=8, num_blocks=8, block_size=4)
    request = rig.add("a", distinct(0, 30), max_tokens=2)
    rig.run()
    assert rig.tokens("a") == expected_reply(request.prompt, 2)


# -- reasons ----------------------------------------------------------------------------------------------


def rig_with_all_places_taken() -> Rig:
    rig = build_rig(budget=2, max_running=2)
    for i in range(2):
        rig.add(f"d{i}", distinct(i, 1), max_tokens=9)
    rig.step()
    return rig


def rig_with_a_giant() -> Rig:
    rig = build_rig(budget=8)
    rig.add("giant", distinct(0, 80), max_tokens=1)
    return rig


def rig_with_a_full_pool() -> Rig:
    rig = build_rig(budget=16, num_blocks=4)
    rig.add("holder", distinct(0, 13), max_tokens=3)
    return rig


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (rig_with_all_places_taken, Reason.MAX_RUNNING),
        (rig_with_a_giant, Reason.BUDGET),
        (rig_with_a_full_pool, Reason.BLOCKS),
    ],
)
@pytest.mark.parametrize("num", [1, 100])
def test_everyone_left_out_has_a_reason_without_a_list_as_long_as_the_queue(
    make: Callable[[], Rig], reason: Reason, num: int
) -> None:
    rig = make()
    for i in range(num):
        rig.add(f"w{i}", distinct(i + 1, 9), max_tokens=4)
    schedule = rig.decide()
    reasons = rig.scheduler.state.explain(schedule)
    assert reasons[RequestId("w0")] is reason
    assert all(RequestId(f"w{i}") in reasons for i in range(num))
    assert len(schedule.left_out) <= 20
    assert len(schedule.left_out) + schedule.num_not_examined == len(reasons)


def test_who_is_too_far_back_to_be_looked_at_waits_for_its_turn() -> None:
    """20 prompts that do not fit: 8 are looked at, and the step gives up."""
    rig = rig_with_a_full_pool()
    rig.step()
    for i in range(20):
        rig.add(f"w{i}", distinct(i + 1, 9), max_tokens=4)
    schedule = rig.decide()
    assert set(schedule.reasons.values()) == {Reason.BLOCKS}
    assert (schedule.queue_reason, schedule.num_not_examined) == (Reason.NOT_EXAMINED, 12)
