"""How much of a prompt goes into a step: allowances against their definition, targets against predictions."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rig import build_rig

from legato.core.budget import (
    EFFICIENCY_LOSS,
    FLOOR_SHARE,
    Allowance,
    FixedBudget,
    LimitedBy,
    TargetBudget,
)
from legato.core.request import Request, RequestId
from legato.core.sequence import Sequence
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepCost, StepShape, shape_of
from legato.sampling_params import SamplingParams

TRUE = StepCost(step=0.012, head=0.006, decode=1.5e-3, prefill=6e-4, context=3e-7, pair=4e-8)


def price(most: float, least: float = 0.0) -> st.SearchStrategy[float]:
    return st.floats(least, most, allow_subnormal=False)


COSTS = st.builds(
    StepCost,
    step=price(0.1, 1e-6),
    head=price(0.1),
    decode=price(0.01),
    prefill=price(0.01),
    context=price(1e-5),
    pair=st.one_of(st.just(0.0), price(1e-6, 1e-12)),
    correction=st.tuples(*[st.floats(0.5, 2.0)] * 3),
)


def decode(num_known: int, target: float | None = None) -> Sequence:
    """A sequence with only its newest token to compute."""
    params = SamplingParams(max_tokens=9)
    prompt = (1,) * num_known
    request = Request(id=RequestId("d"), prompt=prompt, params=params, arrival=0.0, tpot_target=target)
    return Sequence(
        request,
        arrival_index=0,
        chain=[],
        guaranteed=False,
        arrival_step=0,
        arrival_virtual_time=0.0,
        num_computed=num_known - 1,
    )


def knowing(cost: StepCost, margin: float = 1.0) -> CostModel:
    model = CostModel(prior=cost)
    model.margin = margin
    return model


def budget_of(
    target: float | None, *, max_tokens: int = 2048, min_chunk: int = 32, margin: float = 1.0
) -> TargetBudget:
    return TargetBudget(max_tokens, knowing(TRUE, margin), target=target, min_chunk=min_chunk)


@given(COSTS, st.floats(0, 5), st.integers(0, 20_000))
def test_a_scored_chunk_is_priced_as_a_decode_for_each_scored_row(
    cost: StepCost, seconds: float, start: int
) -> None:
    """Each of its rows goes through the LM head, so fewer fit into the same time."""
    tokens = 3_000
    allowance = Allowance(LimitedBy.TARGET, tokens, seconds=seconds, cost=cost)
    left = allowance.left(start, scored=True)
    assert left <= allowance.left(start)
    tiny = 1e-9 * max(seconds, 1.0)
    if left:
        assert cost.chunk_seconds(start, left, left) <= seconds + tiny
    if left < tokens:
        assert cost.chunk_seconds(start, left + 1, left + 1) > seconds - tiny
    shape = StepShape(0, 64, 0, 64 * 64, False)
    scored = cost.seconds(shape._replace(num_scored=64)) - cost.seconds(shape)
    assert scored == pytest.approx(cost.correction[1] * 64 * cost.decode, abs=1e-12)


# -- an allowance -----------------------------------------------------------------------------------------


@given(COSTS, st.floats(-1, 5), st.integers(0, 20_000), st.integers(0, 3_000), st.floats(0, 0.5))
def test_what_is_left_fits_and_one_token_more_does_not(
    cost: StepCost, seconds: float, start: int, tokens: int, floor: float
) -> None:
    """The first chunk may take the floor, and has at least two tokens if there are."""
    allowance = Allowance(LimitedBy.TARGET, tokens, target=1.0, seconds=seconds, floor=floor, cost=cost)
    left, most = allowance.left(start), max(seconds, floor)
    tiny = 1e-9 * max(abs(most), 1)
    assert min(2 * (floor > 0), tokens) <= left <= tokens
    if left > 2 * (floor > 0):
        assert cost.chunk_seconds(start, left) <= most + tiny
    if left < tokens:
        assert cost.chunk_seconds(start, left + 1) > most - tiny


@given(COSTS, st.integers(0, 30_000), st.integers(1, 64))
def test_the_shortest_chunk_deep_in_a_text_takes_as_long_as_one_at_its_start(
    cost: StepCost, start: int, length: int
) -> None:
    allowance = Allowance(LimitedBy.TARGET, 2048, target=1.0, seconds=0.0, cost=cost)
    shortest = allowance.shortest(start, length)
    assert 1 <= shortest <= length
    if shortest > 1:
        assert cost.chunk_seconds(start, shortest) <= cost.chunk_seconds(0, length) * (1 + 1e-9)
    if shortest < length:
        assert cost.chunk_seconds(start, shortest + 1) >= cost.chunk_seconds(0, length) * (1 - 1e-9)
    assert Allowance(LimitedBy.TOKENS, 2048, cost=cost).shortest(start, length) == length


@given(COSTS, st.floats(0.001, 5), st.lists(st.tuples(st.integers(0, 9_000), st.floats(0, 1)), max_size=6))
def test_what_is_taken_is_gone(cost: StepCost, seconds: float, asks: list[tuple[int, float]]) -> None:
    allowance = Allowance(LimitedBy.TARGET, 2048, target=9.0, seconds=seconds, cost=cost)
    spent, placed = 0.0, 0
    for start, share in asks:
        length = math.ceil(share * allowance.left(start))
        if length:
            allowance.take(start, length)
            spent, placed = spent + cost.chunk_seconds(start, length), placed + length
    assert allowance.tokens == 2048 - placed
    assert allowance.seconds == pytest.approx(seconds - spent, abs=1e-9)
    assert (allowance.limited_by is LimitedBy.FLOOR) == (allowance.seconds < 0)


@given(
    cost=COSTS,
    seconds=st.one_of(st.none(), st.floats(-1, 5)),
    first=st.integers(0, 20_000),
    length=st.integers(1, 64),
    tokens=st.integers(0, 3_000),
    floor=st.floats(0, 0.1),
    part=st.floats(0, 1),
    asks=st.lists(st.tuples(st.integers(0, 20_000), st.floats(0, 1)), max_size=6),
)
@example(cost=TRUE, seconds=0.1, first=0, length=32, tokens=2048, floor=0.0, part=0.9, asks=[(0, 1.0)])
@example(cost=TRUE, seconds=0.1, first=20_000, length=64, tokens=2048, floor=0.0, part=0.9, asks=[(0, 1.0)])
def test_a_share_leaves_what_it_was_told_to_leave(
    cost: StepCost,
    seconds: float | None,
    first: int,
    length: int,
    tokens: int,
    floor: float,
    part: float,
    asks: list[tuple[int, float]],
) -> None:
    """However far into their texts the others are, and the one whose chunk is kept. (Chunks of one token have
    a price of their own.)"""
    allowance = Allowance(LimitedBy.TOKENS, tokens)
    if seconds is not None:
        allowance = Allowance(LimitedBy.TARGET, tokens, target=9.0, seconds=seconds, floor=floor, cost=cost)
    before, kept = allowance.left(first), allowance.shortest(first, length)
    share = allowance.split_off(part, first, length)
    for start, ask in asks:
        taken = math.ceil(ask * share.left(start))
        if taken > 1:
            assert taken <= allowance.left(start)
            share.take(start, taken)
            allowance.take(start, taken)
    assert tokens - allowance.tokens <= part * tokens
    if kept > 1 or seconds is None:
        assert allowance.left(first) >= min(before, kept)


def test_a_chunk_far_into_a_text_is_shorter() -> None:
    allowance = budget_of(0.1).allow([decode(100)])
    assert allowance.left(0) > 1.5 * allowance.left(8_000) > allowance.left(16_000)


# -- budgets ----------------------------------------------------------------------------------------------


def test_a_fixed_budget_is_what_the_decodes_leave() -> None:
    allowance = FixedBudget(64).allow([decode(10, 0.001)] * 5)
    assert (allowance.limited_by, allowance.left(0), allowance.left(9_000)) == (LimitedBy.TOKENS, 59, 59)
    allowance.take(0, 50)
    assert allowance.left(7) == 9


@given(
    target=st.floats(0.001, 2),
    margin=st.floats(1, 1.5),
    contexts=st.lists(st.integers(1, 3_000), min_size=1, max_size=16),
    asks=st.lists(st.tuples(st.integers(0, 9_000), st.floats(0, 1)), max_size=5),
    min_chunk=st.integers(1, 64),
    cost=COSTS,
)
def test_a_step_keeps_the_target_or_says_that_it_does_not(
    target: float,
    margin: float,
    contexts: list[int],
    asks: list[tuple[int, float]],
    min_chunk: int,
    cost: StepCost,
) -> None:
    """Whatever share of what is left the prompts take, chunk after chunk."""
    budget = TargetBudget(1024, knowing(cost, margin), target=target, min_chunk=min_chunk)
    allowance = budget.allow([decode(num) for num in contexts])
    runs = [(num - 1, 1, True) for num in contexts]
    alone = cost.seconds(shape_of(runs))
    assert (allowance.limited_by is LimitedBy.UNREACHABLE) == (alone > target)
    for start, share in asks:
        length = math.ceil(share * allowance.left(start))
        if length:
            allowance.take(start, length)
            runs.append((start, length, False))
    shape = shape_of(runs)
    assert sum(length for _, length, _ in runs) <= 1024
    if allowance.limited_by is LimitedBy.TARGET and shape.num_prefill:
        assert cost.seconds(shape) * margin <= target * (1 + 1e-9)
    chunks = [(start, length) for start, length, sampled in runs if not sampled]
    within = cost.seconds(shape) * margin <= target
    if chunks and chunks[-1][1] > 2 and not within:
        seconds = sum(cost.chunk_seconds(start, length) for start, length in chunks)
        assert seconds <= FLOOR_SHARE * max(target, alone) * (1 + 1e-9)


def test_the_strictest_of_those_that_decode_rules() -> None:
    """Their own targets and the server's; one that is looser than the server's is looser."""
    budget = budget_of(0.2)
    cases = [
        ([None, None], 0.2),
        ([None, 0.1], 0.1),
        ([0.3, 0.1, None], 0.1),
        ([0.3, 0.4], 0.3),
    ]
    for own, expected in cases:
        assert budget.allow([decode(50, target) for target in own]).target == expected
    assert budget_of(None).allow([decode(50), decode(50, 0.15)]).target == 0.15
    strict, loose = (budget.allow([decode(50, target)]).left(0) for target in (0.1, 0.3))
    assert 0 < strict < loose


def test_without_any_target_it_is_the_fixed_budget() -> None:
    allowance = budget_of(None, max_tokens=256).allow([decode(50)] * 8)
    assert (allowance.limited_by, allowance.left(0), allowance.left(9_000)) == (LimitedBy.TOKENS, 248, 248)
    allowance = budget_of(None, max_tokens=256).allow([])
    assert (allowance.limited_by, allowance.left(0)) == (LimitedBy.TOKENS, 256)


def test_prompts_alone_get_the_knee() -> None:
    """A step costs 12 ms, each token 0.6 ms and some more: with about 370 tokens a twentieth of its time is
    the former. Deep in a text fewer tokens take as long."""
    allowance = budget_of(0.05).allow([])
    assert (allowance.limited_by, allowance.target) == (LimitedBy.KNEE, None)
    assert 370 <= allowance.left(0) <= 380
    for start in (0, 9_000, 90_000):
        seconds = TRUE.chunk_seconds(start, allowance.left(start))
        assert TRUE.step / (TRUE.step + seconds) == pytest.approx(EFFICIENCY_LOSS, rel=0.03)
    assert allowance.left(9_000) < 180
    assert budget_of(0.05, max_tokens=100).allow([]).limited_by is LimitedBy.TOKENS
    assert budget_of(0.05, min_chunk=700).allow([]).left(0) == 700


def test_tokens_that_cost_nothing_have_no_knee() -> None:
    """A fit may say so for a while."""
    free = StepCost(step=0.01, head=0, decode=0, prefill=0, context=0, pair=0)
    allowance = TargetBudget(64, knowing(free), target=0.05).allow([])
    assert (allowance.limited_by, allowance.left(0)) == (LimitedBy.TOKENS, 64)


@pytest.mark.parametrize(("target", "limit"), [(0.001, LimitedBy.UNREACHABLE), (0.0325, LimitedBy.FLOOR)])
@pytest.mark.parametrize("start", [0, 2_000, 9_000])
def test_the_floor_keeps_prompts_going_where_the_target_cannot_and_it_shows(
    target: float, limit: LimitedBy, start: int
) -> None:
    """8 decodes take 30 ms. The first chunk gets a tenth of the target, or of that time, wherever it is; the
    others of the step nothing."""
    allowance = budget_of(target).allow([decode(100)] * 8)
    alone = TRUE.seconds(shape_of([(99, 1, True)] * 8))
    length = allowance.left(start)
    assert length >= 1
    assert TRUE.chunk_seconds(start, length) <= FLOOR_SHARE * max(target, alone)
    assert TRUE.chunk_seconds(start, length + 1) > FLOOR_SHARE * max(target, alone)
    allowance.take(start, length)
    assert allowance.left(0) == 0
    assert allowance.limited_by is limit


def test_two_tokens_get_their_step_even_if_they_take_longer_than_the_floor() -> None:
    allowance = budget_of(0.0325).allow([decode(100)] * 8)
    assert allowance.left(50_000_000) == 2


def test_a_disturbance_does_not_keep_chunks_small_once_it_is_over() -> None:
    """Steps take three times as long for a while. Chunks shrink to the least; soon after the end they are as
    long as before. With chunks of one token, which count as decodes, the budget would never learn of it."""
    speed, flat = [1.0], replace(TRUE, prefill=0.01, context=0.0, pair=0.0)  # depth shortens no chunk
    budget = TargetBudget(2048, knowing(flat), target=0.1, min_chunk=32)
    rig = build_rig(
        budget=2048,
        max_running=16,
        num_blocks=4_000,
        block_size=16,
        timed=budget,
        seconds=lambda shape: speed[0] * flat.seconds(shape),
    )
    for i in range(8):
        rig.add(f"s{i}", 40, max_tokens=3_000)
    rig.add("long", 50_000, max_tokens=1)

    def longest_chunk(num_steps: int) -> int:
        rig.schedules.clear()
        for _ in range(num_steps):
            rig.step()
        return max(chunk.length for schedule in rig.schedules for chunk in schedule.chunks)

    longest_chunk(20)
    before = longest_chunk(10)
    speed[0] = 3.0
    longest_chunk(60)
    assert longest_chunk(10) == 2 < before
    speed[0] = 1.0
    longest_chunk(300)
    assert longest_chunk(10) > 0.7 * before


def test_a_larger_margin_leaves_less() -> None:
    left = [budget_of(0.1, margin=margin).allow([decode(100)] * 8).left(0) for margin in (1.0, 1.1, 1.3)]
    assert left == sorted(left, reverse=True)
    assert left[0] > left[-1] > 0


def test_a_single_token_that_is_dear_is_not_taken_for_a_cheap_one() -> None:
    """To the model it is a decode; here one costs 20 times a prompt's token."""
    cost = StepCost(step=0.01, head=0, decode=0.02, prefill=0.001, context=0, pair=0)
    allowance = Allowance(LimitedBy.TARGET, 100, target=1.0, seconds=0.0015, cost=cost)
    assert allowance.left(0) == 0
    allowance = Allowance(LimitedBy.TARGET, 100, target=1.0, seconds=0.010, cost=cost)
    assert allowance.left(0) == 10
    allowance.take(0, 1)
    assert allowance.limited_by is LimitedBy.FLOOR


# -- in a scheduler ---------------------------------------------------------------------------------------


def test_gaps_keep_to_the_target_while_a_long_prompt_arrives_and_the_machine_slows_down() -> None:
    """Steps last as the true prices say, give or take 3 %; the budget starts with the prior alone."""
    draw = random.Random(0)
    speed = [1.0]
    rig = build_rig(
        budget=2048,
        max_running=16,
        num_blocks=1000,
        block_size=16,
        timed=TargetBudget(2048, CostModel(), target=0.1, min_chunk=32),
        seconds=lambda shape: speed[0] * TRUE.seconds(shape) * draw.lognormvariate(0, 0.03),
    )
    for i in range(8):
        rig.add(f"s{i}", 40, max_tokens=400)
    for _ in range(60):  # the prior is learned away
        rig.step()
    for factor, num, used in ((1.0, 0, 0.85), (1.5, 20, 0.75)):
        speed[0] = factor
        rig.add(f"long {factor}", 4_000, max_tokens=1)
        times = [rig.now]
        while (
            any(name.startswith("long") for name in rig.scheduler.state.running)
            or rig.scheduler.state.waiting
        ):
            rig.step()
            times.append(rig.now)
        gaps = [after - before for before, after in pairwise(times)][num:]
        assert len(gaps) > 20
        assert max(gaps) < 0.1 * 1.1
        assert sum(gaps) / len(gaps) > 0.1 * used, "the target is made use of"


def test_gaps_keep_to_the_target_while_a_prompt_is_scored() -> None:
    """The log-probabilities of a prompt's tokens cost a row of logits each: its chunks are shorter."""
    longest: dict[int | None, float] = {}
    for scored in (None, 0):
        budget = TargetBudget(2048, knowing(TRUE, 1.0), target=0.06, min_chunk=16)
        rig = build_rig(
            budget=2048, max_running=16, num_blocks=400, block_size=16, timed=budget, seconds=TRUE.seconds
        )
        for i in range(4):
            rig.add(f"s{i}", 40, max_tokens=400)
        for _ in range(20):
            rig.step()
        rig.schedules.clear()
        rig.add("long", 600, max_tokens=1, prompt_logprobs=scored)
        for _ in range(80):
            rig.step()
        chunks = [chunk for schedule in rig.schedules for chunk in schedule.chunks]
        assert sum(chunk.length for chunk in chunks) == 600
        assert sum(chunk.num_scored for chunk in chunks) == (0 if scored is None else 599)
        assert all(TRUE.seconds(schedule.shape) <= 0.06 * 1.1 for schedule in rig.schedules)
        longest[scored] = max(chunk.length for chunk in chunks)
    none, some = longest.values()
    assert some < none / 2
