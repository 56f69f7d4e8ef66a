"""The small parts: life cycle, pool, what a plan carries."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import build_rig

from legato.core.block_pool import BlockPool
from legato.core.lifecycle import (
    TRANSITIONS,
    IllegalTransitionError,
    Status,
    Transition,
    next_status,
)
from legato.core.request import Request, RequestId
from legato.core.sequence import Sequence
from legato.sampling_params import SamplingParams

LEGAL = [(status, move) for status, moves in TRANSITIONS.items() for move in moves]


def a_sequence() -> Sequence:
    params = SamplingParams(max_tokens=4)
    request = Request(id=RequestId("A"), prompt=(1, 2), params=params, arrival=0.0)
    return Sequence(
        request, arrival_index=0, chain=[b""], guaranteed=False, arrival_step=0, arrival_virtual_time=0.0
    )


@pytest.mark.parametrize(("status", "move"), [*itertools.product(Status, Transition)])
def test_a_move_is_in_the_table_or_raises_and_changes_nothing(status: Status, move: Transition) -> None:
    sequence = a_sequence()
    sequence.status = status
    if (status, move) in LEGAL:
        sequence.apply(move)
        assert sequence.status is TRANSITIONS[status][move]
    else:
        with pytest.raises(IllegalTransitionError, match=f"a {status.value} sequence cannot {move.value}"):
            sequence.apply(move)
        assert sequence.status is status


def test_every_status_is_reached_and_only_finished_is_final() -> None:
    assert set(TRANSITIONS) == set(Status)
    assert {next_status(status, move) for status, move in LEGAL} == set(Status) - {Status.WAITING}
    assert [status for status, moves in TRANSITIONS.items() if not moves] == [Status.FINISHED]


@given(st.lists(st.integers(0, 5), max_size=30), st.randoms(use_true_random=False))
def test_the_pool_never_hands_a_block_out_twice(sizes: list[int], random: object) -> None:
    pool = BlockPool(12, 4)
    held: list[list[int]] = []
    for size in sizes:
        taken = pool.try_take(size)
        pool.check()
        if taken is None:
            assert size > pool.num_free
            if held:
                pool.release(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
        else:
            held.append(taken)
        blocks = [block for group in held for block in group]
        assert len(set(blocks)) == len(blocks) == pool.num_used
        assert all(pool.num_holders(block) == 1 for block in blocks)
    for group in held:
        pool.release(group)
    assert pool.num_free == 12


@pytest.mark.parametrize("blocks", [[0], [1, 1]])
def test_releasing_twice_raises_and_changes_nothing(blocks: list[int]) -> None:
    pool = BlockPool(4, 4)
    assert pool.try_take(2) == [0, 1]
    pool.release([0])
    with pytest.raises(RuntimeError, match="released twice"):
        pool.release(blocks)
    pool.check()
    assert pool.num_used == 1


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 4).blocks_for(tokens) == blocks


@pytest.mark.parametrize(
    ("params", "carried"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_k": 3}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
    ],
)
def test_a_plan_carries_history_only_for_penalties(params: dict[str, float], carried: bool) -> None:
    rig = build_rig()
    rig.add("A", (5, 7), max_tokens=3, **params)
    rig.step()
    row = rig.begin().sample[0]
    assert (row.prompt, row.generated) == (((5, 7), (13,)) if carried else ((), ()))
    assert row.num_generated == 1
