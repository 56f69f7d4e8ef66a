"""The fake runner reads what the block tables say: every token, from every block."""

import pytest

from legato.core.request import RequestId
from legato.core.step_plan import ForwardBatch, ForwardSeq, SampleRow, StepPlan
from legato.engine.fake import FakeRunner, next_token
from legato.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=1)
TOKENS = tuple(range(3, 14))


def step(tokens: tuple[int, ...], start: int, blocks: tuple[int, ...]) -> StepPlan:
    seq = ForwardSeq(RequestId("r"), tokens, start, blocks)
    return StepPlan(ForwardBatch((seq,)), (SampleRow(0, RequestId("r"), PARAMS, 0),))


def new_runner() -> FakeRunner:
    return FakeRunner(num_blocks=8, block_size=4, vocab_size=1000)


@pytest.mark.parametrize("chunks", [(11,), (1, 10), (4, 4, 3), (3, 3, 3, 2), (1,) * 11])
def test_chunks_do_not_change_what_is_read(chunks: tuple[int, ...]) -> None:
    runner, start = new_runner(), 0
    runner.run(step((999,) * 12, 0, (5, 2, 7)))  # what others left behind
    for length in chunks:
        result = runner.run(step(TOKENS[start : start + length], start, (7, 2, 5)))
        start += length
    assert result.sampled[0].token == next_token(list(TOKENS), 1000)


@pytest.mark.parametrize("wrong", [(0, 2, 5), (7, 0, 5), (7, 2, 0)])
def test_a_wrong_block_anywhere_in_the_table_changes_the_answer(wrong: tuple[int, ...]) -> None:
    runner = new_runner()
    runner.run(step(TOKENS, 0, (7, 2, 5)))
    right = next_token([*TOKENS, 1], 1000)
    assert runner.run(step((1,), 11, wrong)).sampled[0].token != right
    assert runner.run(step((1,), 11, (7, 2, 5))).sampled[0].token == right


def test_a_block_that_is_written_over_changes_the_answer() -> None:
    runner = new_runner()
    runner.run(step(TOKENS, 0, (7, 2, 5)))
    runner.run(step((500,), 1, (2,)))
    assert runner.run(step((1,), 11, (7, 2, 5))).sampled[0].token != next_token([*TOKENS, 1], 1000)
