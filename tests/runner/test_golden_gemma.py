"""Gemma 3 270M in fp32 against Hugging Face: the prompt's likelihood, the last position, the greedy reply."""

from pathlib import Path

import pytest
from golden_model import WHOLE, Case, Loaded, differences, follow, load_cases, load_model, summed_nll

CASES = load_cases("gemma3_270m_greedy.json")
SHORT = [case for case in CASES if len(case.prompt) < 20]


def cases_for(chunk: int) -> list[Case]:
    """All 12, the one of 594 tokens (longer than the window of 512) included; at chunk size 1, where that one
    takes a minute, the 11 others of 4 to 14 tokens: it has a test of its own below."""
    return SHORT if chunk == 1 else CASES


@pytest.fixture(scope="module")
def model(gemma_path: Path) -> Loaded:
    return load_model(gemma_path)


@pytest.mark.parametrize("chunk", [1, 7, 64, WHOLE])
def test_summed_likelihood_of_each_prompt_is_that_of_hugging_face(model: Loaded, chunk: int) -> None:
    ours = summed_nll(model, [case.prompt for case in cases_for(chunk)], chunk)
    assert ours == pytest.approx([case.sum_nll for case in cases_for(chunk)], rel=1e-3)


@pytest.mark.parametrize("chunk", [1, 7, 64, WHOLE])
def test_last_position_and_greedy_reply_are_those_of_hugging_face(model: Loaded, chunk: int) -> None:
    """All prompts in one mixed batch: the short ones decode while the long one is still prefilled."""
    cases = cases_for(chunk)
    replies = follow(model, cases, chunk)
    assert [differences(reply, case) for reply, case in zip(replies, cases, strict=True)] == [[]] * len(cases)


@pytest.mark.big
@pytest.mark.timeout(900)
def test_the_long_prompt_one_token_at_a_time_is_that_of_hugging_face(model: Loaded) -> None:
    (case,) = [case for case in CASES if case not in SHORT]
    assert summed_nll(model, [case.prompt], 1) == pytest.approx([case.sum_nll], rel=1e-3)
    (reply,) = follow(model, [case], 1)
    assert differences(reply, case) == []
