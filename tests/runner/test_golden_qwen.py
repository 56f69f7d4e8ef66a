"""Qwen 2.5 Coder 1.5B in fp32 against Hugging Face: the prompt's likelihood, the last position, the reply."""

from pathlib import Path

import pytest
from golden_model import WHOLE, Loaded, differences, follow, load_cases, load_model, summed_nll

pytestmark = [pytest.mark.big, pytest.mark.timeout(900)]
CASES = load_cases("qwen25_coder_greedy.json")


@pytest.fixture(scope="module")
def model(qwen_path: Path) -> Loaded:
    """6.2 GB of fp32 weights."""
    return load_model(qwen_path)


@pytest.mark.parametrize("chunk", [1, 7, 64, WHOLE])
def test_summed_likelihood_of_each_prompt_is_that_of_hugging_face(model: Loaded, chunk: int) -> None:
    ours = summed_nll(model, [case.prompt for case in CASES], chunk)
    assert ours == pytest.approx([case.sum_nll for case in CASES], rel=1e-3)


@pytest.mark.parametrize("chunk", [1, 7, 64, WHOLE])
def test_last_position_and_greedy_reply_are_those_of_hugging_face(model: Loaded, chunk: int) -> None:
    replies = follow(model, CASES, chunk)
    assert [differences(reply, case) for reply, case in zip(replies, CASES, strict=True)] == [[]] * len(CASES)
