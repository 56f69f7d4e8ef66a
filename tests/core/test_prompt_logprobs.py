"""Log-probabilities of prompt tokens, by hand: each exactly once, in order, whatever the schedule."""

import pytest
from rig import VOCAB, Rig, build_rig, made_up

from legato.core.events import FinishEvent, PromptEvent, TokenEvent
from legato.core.invariants import check_state
from legato.core.lifecycle import FinishReason
from legato.core.prefill_policy import Chunked
from legato.core.step_plan import TokenLogprobs
from legato.engine.fake import next_token

PROMPT = made_up("a", 33)


def by_hand(prompt: list[int], num_top: int = 1) -> list[TokenLogprobs]:
    """What the fake runner says of all tokens of a prompt but the first."""
    entries = []
    for end, token in enumerate(prompt[1:], 1):
        said = next_token(prompt[:end], VOCAB)
        wrong = int(said != token)
        entries.append(TokenLogprobs(token, -float(wrong), ((said, 0.0),) if num_top else (), 1 + wrong))
    return entries


def scored(rig: Rig, name: str) -> list[TokenLogprobs]:
    events = [e for e in rig.events if isinstance(e, PromptEvent) and e.request_id == name]
    assert all(event.scored for event in events)
    return [token for event in events for token in event.scored]


def said_by_the_fake(length: int) -> list[int]:
    """A prompt that begins with 5 and goes on as the fake runner would."""
    prompt = [5]
    while len(prompt) < length:
        prompt.append(next_token(prompt, VOCAB))
    return prompt


@pytest.mark.parametrize("num_top", [0, 1])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 33])
def test_every_token_but_the_first_is_scored_once_whatever_the_chunks(chunk: int, num_top: int) -> None:
    rig = build_rig(budget=40, prefill_policy=Chunked(chunk))
    prompt = [*PROMPT, *said_by_the_fake(8)]
    rig.add("a", prompt, max_tokens=3, prompt_logprobs=num_top)
    rig.run()
    assert scored(rig, "a") == by_hand(prompt, num_top)
    assert len(rig.tokens("a")) == 3
    rig.assert_idle()


def test_a_prompt_as_the_model_would_write_it_has_log_probability_0() -> None:
    rig = build_rig()
    rig.add("a", said_by_the_fake(10), prompt_logprobs=0)
    rig.run()
    assert [token.logprob for token in scored(rig, "a")] == [0.0] * 9


def test_only_who_asks_is_scored() -> None:
    rig = build_rig()
    rig.add("a", 9)
    rig.run()
    assert not scored(rig, "a")


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    rig = build_rig()
    rig.add("a", [5], max_tokens=1, prompt_logprobs=1)
    rig.run()
    assert not any(isinstance(event, PromptEvent) for event in rig.events)
    assert len(rig.tokens("a")) == 1


@pytest.mark.parametrize("length", [31, 32, 33, 34])
def test_e_03_a_cached_prefix_is_not_taken_and_the_second_run_scores_the_same(length: int) -> None:
    """Blocks of 4; the prompt ends before, at and behind the end of one."""
    rig = build_rig(budget=10)
    prompt = [*PROMPT, 7][:length]
    for name in ("cold", "warm"):
        rig.add(name, prompt, max_tokens=1, prompt_logprobs=1)
        rig.run()
        assert scored(rig, name) == by_hand(prompt)
    assert [e.num_cached for e in rig.events if isinstance(e, TokenEvent)] == [0, 0]
    rig.add("plain", prompt, max_tokens=1)
    rig.run()
    (cached,) = [e.num_cached for e in rig.events if isinstance(e, TokenEvent) and e.request_id == "plain"]
    assert cached == (length - 1) // 4 * 4, "others find what it computed"


def test_a_prompt_that_is_scored_does_not_wait_for_another_with_its_beginning() -> None:
    rig = build_rig(budget=8)
    rig.add("leader", PROMPT)
    rig.add("scored", PROMPT, prompt_logprobs=1)
    rig.run()
    assert scored(rig, "scored") == by_hand(PROMPT)
    assert rig.tokens("scored") == rig.tokens("leader")


@pytest.mark.parametrize("num_computed", [10, 20, 30])
def test_a_preemption_scores_nothing_twice(num_computed: int) -> None:
    """It takes what is left of its blocks as far as their tokens are scored, and goes on behind."""
    rig = build_rig(budget=5, block_size=4, num_blocks=20)
    request = rig.add("a", PROMPT, max_tokens=6, prompt_logprobs=1)
    sequence = rig.scheduler.state.sequence(request.id)
    while sequence.num_computed < num_computed:
        rig.step()
    rig.scheduler._preempt(sequence)
    check_state(rig.scheduler.state)
    schedule = rig.step()
    (chunk,) = schedule.chunks
    assert 0 < chunk.start <= num_computed
    rig.run()
    assert scored(rig, "a") == by_hand(PROMPT)
    assert len(rig.tokens("a")) == 6
    rig.assert_idle()


def test_a_preemption_behind_the_prompt_takes_all_that_is_left() -> None:
    rig = build_rig(budget=40)
    request = rig.add("a", PROMPT, max_tokens=9, prompt_logprobs=1)
    for _ in range(4):
        rig.step()
    rig.scheduler._preempt(rig.scheduler.state.running[request.id])
    (chunk,) = rig.step().runs
    assert chunk.start == 36
    rig.run()
    assert scored(rig, "a") == by_hand(PROMPT)


class TestNoReply:
    """`max_tokens` 0: the prompt is all that is asked about."""

    @pytest.mark.parametrize("length", [1, 4, 33])
    def test_it_ends_with_its_prompt_and_without_a_token(self, length: int) -> None:
        rig = build_rig()
        rig.add("a", PROMPT[:length], max_tokens=0, prompt_logprobs=1)
        rig.run()
        assert scored(rig, "a") == by_hand(PROMPT[:length])
        assert rig.events[-1] == FinishEvent(rig.events[-1].request_id, FinishReason.LENGTH)
        assert not rig.tokens("a")
        rig.assert_idle()

    def test_a_prompt_may_fill_the_context(self) -> None:
        rig = build_rig(num_blocks=4, block_size=4)
        rig.add("a", 16, max_tokens=0, prompt_logprobs=0)
        rig.run()
        assert len(scored(rig, "a")) == 15

    def test_it_does_not_count_as_a_short_reply(self) -> None:
        rig = build_rig()
        before = rig.scheduler.state.output_lengths._counts.copy()
        rig.add("a", 5, max_tokens=0, prompt_logprobs=0)
        rig.run()
        assert rig.scheduler.state.output_lengths._counts == before


def test_an_abort_in_mid_prompt_ends_the_scores() -> None:
    rig = build_rig(budget=5)
    request = rig.add("a", PROMPT, prompt_logprobs=1)
    rig.step()
    step = rig.begin()
    rig.scheduler.abort(request.id)
    rig.finish(step)
    assert scored(rig, "a") == by_hand(PROMPT[:6])
    rig.assert_idle()
