"""Plans to tensors, against per-token arithmetic."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runner_steps import CPU, GREEDY

from legato.core.request import RequestId
from legato.core.step_plan import ForwardBatch, ForwardSeq, SampleRow, StepPlan
from legato.runner.inputs import build_inputs


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int]:
    """A batch over disjoint shuffled blocks, some of its sequences sampled; and the block size."""
    block_size = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    free = draw(st.permutations(range(300)))
    seqs = []
    for i, length in enumerate(lengths):
        start = draw(st.integers(0, 20))
        needed = -(-(start + length) // block_size) + draw(st.integers(0, 2))
        blocks, free = tuple(free[:needed]), free[needed:]
        tokens = tuple(draw(st.lists(st.integers(0, 2**31), min_size=length, max_size=length)))
        seqs.append(ForwardSeq(RequestId(str(i)), tokens, start, blocks))
    chosen = draw(st.lists(st.sampled_from(range(len(seqs))), unique=True))
    rows = tuple(SampleRow(i, RequestId(str(i)), GREEDY, 0) for i in chosen)
    return StepPlan(ForwardBatch(tuple(seqs)), rows), block_size


@given(plans())
def test_every_token_gets_the_position_slot_and_row_that_the_definition_says(
    case: tuple[StepPlan, int],
) -> None:
    plan, block_size = case
    tokens, positions, slots, last_rows, query_start = [], [], [], [], [0]
    for seq in plan.batch.seqs:
        for offset, token in enumerate(seq.tokens):
            position = seq.start + offset
            tokens.append(token)
            positions.append(position)
            slots.append(seq.block_table[position // block_size] * block_size + position % block_size)
        query_start.append(len(tokens))
        last_rows.append(len(tokens) - 1)
    inputs = build_inputs(plan, block_size=block_size, device=CPU)
    assert inputs.token_ids.tolist() == tokens
    assert inputs.positions.tolist() == positions
    assert inputs.rows.tolist() == [last_rows[row.seq] for row in plan.sample]
    assert inputs.batch.slots.tolist() == slots
    assert inputs.batch.query_start.tolist() == query_start
    assert inputs.batch.start.tolist() == [seq.start for seq in plan.batch.seqs]
    width = max(len(seq.block_table) for seq in plan.batch.seqs)
    assert inputs.batch.block_table.tolist() == [
        [*seq.block_table, *[0] * (width - len(seq.block_table))] for seq in plan.batch.seqs
    ]


@given(plans())
def test_the_types_are_those_that_attention_asks_for(case: tuple[StepPlan, int]) -> None:
    inputs = build_inputs(case[0], block_size=case[1], device=CPU)
    batch = inputs.batch
    assert {inputs.token_ids.dtype, inputs.positions.dtype, inputs.rows.dtype, batch.slots.dtype} == {
        torch.int64
    }
    assert {batch.query_start.dtype, batch.start.dtype, batch.block_table.dtype} == {torch.int32}


def test_slots_of_a_large_pool_do_not_wrap_at_32_bits() -> None:
    seq = ForwardSeq(RequestId("a"), (1,), 0, (2**30,))
    inputs = build_inputs(StepPlan(ForwardBatch((seq,)), ()), block_size=256, device=CPU)
    assert inputs.batch.slots.tolist() == [2**38]
    assert inputs.rows.tolist() == []


@pytest.mark.parametrize(
    "seqs",
    [(), (ForwardSeq(RequestId("a"), (), 3, (1,)),), (ForwardSeq(RequestId("a"), (1, 2), 3, (1,)),)],
    ids=["no sequence", "no token", "table too short"],
)
def test_a_plan_that_no_scheduler_makes_is_a_bug(seqs: tuple[ForwardSeq, ...]) -> None:
    with pytest.raises(AssertionError):
        build_inputs(StepPlan(ForwardBatch(seqs), ()), block_size=4, device=CPU)
