"""Offline use of the packaged model: prompts in, completions out."""

from pathlib import Path

import pytest

from legato import LLM, SamplingParams
from legato.config import EngineSettings, ModelSettings
from legato.core.plan import StepPlan, StepResult
from legato.errors import ConfigError, ContextLengthError, RequestError, StepError

FRANCE = [2, 818, 5279, 529, 7001, 563]
ANSWER = (506, 5279, 529, 506, 2891, 529)


@pytest.fixture(scope="module")
def llm(gemma_path: Path) -> LLM:
    settings = EngineSettings(max_batch_tokens=64, max_running=8, num_blocks=64, block_size=16)
    return LLM.load(ModelSettings(model=str(gemma_path)), settings)


def greedy(max_tokens: int = 6, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)  # type: ignore[arg-type]


def assert_idle(llm: LLM) -> None:
    scheduler = llm.built.engine.scheduler
    assert not scheduler.has_work
    assert scheduler.blocks.num_used == 0


def test_texts_and_token_ids_give_the_same(llm: LLM) -> None:
    by_text, by_ids = llm.generate(["The capital of France is", FRANCE], greedy())
    assert by_text == by_ids
    assert by_text.prompt_token_ids == tuple(FRANCE)
    assert by_text.token_ids == ANSWER
    assert by_text.text == " the capital of the country of"
    assert (by_text.finish_reason, by_text.logprobs) == ("length", None)
    assert_idle(llm)


def test_a_second_batch_gets_its_own_replies_by_position(llm: LLM) -> None:
    """I-08: other prompts, of other lengths and ends, on the engine that had the first ones."""
    first = ["The capital of France is", "One, two,", "A cat"]
    second = ["Water boils at", "x", "The days of the week are Monday,"]
    spec = llm.built.spec
    alone = {prompt: llm.generate(prompt, greedy())[0] for prompt in (*first, *second)}
    for batch in (first, second, second[::-1]):
        assert llm.generate(batch, greedy()) == [alone[prompt] for prompt in batch]
    assert llm.built.spec == spec
    assert_idle(llm)


def test_one_prompt_need_not_be_a_list(llm: LLM) -> None:
    assert llm.generate("The capital of France is", greedy()) == llm.generate(FRANCE, greedy())
    assert llm.generate([], greedy()) == []


def test_log_probabilities_come_when_asked_for(llm: LLM) -> None:
    (completion,) = llm.generate(FRANCE, greedy(2, logprobs=3))
    assert completion.logprobs is not None
    assert [token.token for token in completion.logprobs] == list(ANSWER[:2])
    assert [len(token.top) for token in completion.logprobs] == [3, 3]
    assert completion.logprobs[0].logprob == pytest.approx(-1.65398, abs=5e-3)


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (completion,) = llm.generate(FRANCE, greedy(20), stop=["capital", "country"])
    assert (completion.text, completion.finish_reason) == (" the ", "stop")
    assert_idle(llm)


def test_a_text_can_be_scored_without_a_reply(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=2)
    (completion,) = llm.generate(FRANCE, params)
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", (), "length")
    first, *others = completion.prompt_logprobs or ()
    assert [token.token for token in (first, *others)] == list(completion.prompt_token_ids)
    assert first.logprob is None
    assert all(len(token.top) == 2 and token.logprob is not None and token.logprob < 0 for token in others)


def test_a_stop_token_is_reported_and_adds_no_text(llm: LLM) -> None:
    (completion,) = llm.generate(FRANCE, greedy(20, stop_token_ids=frozenset({529})))
    assert completion.token_ids == ANSWER[:3]
    assert (completion.text, completion.finish_reason) == (" the capital", "stop")


def test_the_end_of_sequence_is_obeyed_or_ignored(llm: LLM) -> None:
    bias = greedy(3, logit_bias=((1, 100.0),))
    assert llm.generate(FRANCE, bias)[0].token_ids == (1,)
    assert llm.generate(FRANCE, bias, ignore_eos=True)[0].token_ids == (1, 1, 1)


def test_a_seed_repeats_and_no_seed_does_not(llm: LLM) -> None:
    def draw(seed: int | None) -> tuple[int, ...]:
        return llm.generate(FRANCE, SamplingParams(max_tokens=8, temperature=2.0, seed=seed))[0].token_ids

    assert draw(5) == draw(5)
    assert draw(None) != draw(None)


def test_a_stream_left_early_is_aborted(llm: LLM) -> None:
    stream = llm.stream(FRANCE, greedy(100))
    assert next(stream).text == " the"
    stream.close()
    assert_idle(llm)


def test_ctrl_c_in_a_step_of_two_streams_ends_both_and_leaves_the_model_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads gets the interrupt; the other one learns what became of its reply."""

    def interrupt(plan: StepPlan) -> StepResult:  # noqa: ARG001
        raise KeyboardInterrupt

    one, other = llm.stream(FRANCE, greedy(50)), llm.stream(FRANCE, greedy(50))
    assert next(one).text == next(other).text == " the"
    with monkeypatch.context() as patch:
        patch.setattr(llm.built.engine._runner, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(one)
    with pytest.raises(StepError, match="KeyboardInterrupt"):
        list(other)
    assert_idle(llm)
    assert llm.generate(FRANCE, greedy())[0].token_ids == ANSWER


def test_what_cannot_be_served_is_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="together at most 1024"):
        llm.generate([FRANCE, FRANCE * 500], greedy())
    with pytest.raises(RequestError, match="no token"):
        llm.generate([[]], greedy())
    with pytest.raises(RequestError, match="mix"):
        llm.generate([1, "a"], greedy())  # type: ignore[list-item]
    assert_idle(llm)


def test_what_the_model_cannot_do_is_refused_at_the_start(gemma_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 99999; the model was made for at most 32768"):
        LLM.load(ModelSettings(model=str(gemma_path), max_model_len=99999))
