"""Offline use of the packaged model: prompts in, completions out."""

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from legato import (
    LLM,
    AsyncLLM,
    ConfigError,
    ContextLengthError,
    EngineSettings,
    LegatoError,
    ModelError,
    ModelSettings,
    RequestError,
    SamplingParams,
    StepError,
    UnavailableError,
)
from legato.core.step_plan import StepPlan, StepResult

FRANCE = [2, 818, 5279, 529, 7001, 563]
ANSWER = (506, 5279, 529, 506, 2891, 529)


@pytest.fixture(scope="module")
def llm(gemma_path: Path) -> LLM:
    settings = EngineSettings(max_batch_tokens=64, max_running=8, num_blocks=64, block_size=16)
    return LLM.load(ModelSettings(model=str(gemma_path)), settings)


def greedy(max_tokens: int = 6, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)  # type: ignore[arg-type]


def assert_idle(llm: LLM) -> None:
    scheduler = llm.model.engine.scheduler
    assert not scheduler.state.has_work
    assert scheduler.state.pool.num_used == 0


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
    spec = llm.model.spec
    alone = {prompt: llm.generate(prompt, greedy())[0] for prompt in (*first, *second)}
    for batch in (first, second, second[::-1]):
        assert llm.generate(batch, greedy()) == [alone[prompt] for prompt in batch]
    assert llm.model.spec == spec
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
    (completion,) = llm.generate(FRANCE, greedy(20, stop=["capital", "country"]))
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
    ignoring = greedy(3, logit_bias={1: 100.0}, ignore_eos=True)
    assert llm.generate(FRANCE, ignoring)[0].token_ids == (1, 1, 1)


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
        patch.setattr(llm.model.engine._executor._runner, "run", interrupt)
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


def test_the_class_is_called_with_a_name_or_a_path_and_settings(gemma_path: Path) -> None:
    llm = LLM(gemma_path, max_num_seqs=2, num_blocks=64, block_size=16, max_model_len=300, dtype="float")
    config = llm.model.engine.scheduler.state.config
    assert (config.max_running, config.max_model_len) == (2, 300)
    assert llm.generate("The capital of France is", greedy(), show_progress=False)[0].token_ids == ANSWER


def test_each_prompt_may_have_params_of_its_own(llm: LLM) -> None:
    params = [greedy(2), greedy(20, stop="capital"), greedy(4)]
    replies = llm.generate([FRANCE] * 3, params)
    assert [reply.text for reply in replies] == [" the capital", " the ", " the capital of the"]
    with pytest.raises(RequestError, match="2 params for 3 prompts"):
        llm.generate([FRANCE] * 3, params[:2])


def test_without_params_the_models_own_sampling_holds(llm: LLM) -> None:
    assert llm.get_default_sampling_params(temperature=0.0) == SamplingParams(temperature=0.0)
    assert len(llm.generate(FRANCE)[0].token_ids) == 16


@pytest.fixture(scope="module")
def chatty(gemma_path: Path) -> LLM:
    return LLM(gemma_path, chat_template="gemma", max_batch_tokens=64, num_blocks=64, block_size=16)


HELLO = [{"role": "user", "content": "Hello"}]


def test_conversations_are_answered_by_the_chat_template(chatty: LLM) -> None:
    """As many as there are; what is asked is what the template writes."""
    (one,) = chatty.chat(HELLO, greedy(3))
    again, other = chatty.chat([HELLO, [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO]], greedy(3))
    assert one == again
    assert len(other.prompt_token_ids) > len(one.prompt_token_ids)
    template = chatty.model.chat_template
    assert template is not None
    prompt = template.render(HELLO)  # type: ignore[arg-type]
    assert one.prompt_token_ids == tuple(chatty.model.tokenizer.encode_chat(prompt))
    assert_idle(chatty)


def test_the_last_message_can_be_continued(chatty: LLM) -> None:
    started = [*HELLO, {"role": "assistant", "content": "The capital of France is"}]
    (reply,) = chatty.chat(started, greedy(1), continue_final_message=True)
    assert chatty.model.tokenizer.decode(reply.prompt_token_ids).endswith("The capital of France is")


IDS = [2, 818, 5279, 529]

ARRAYS: list[tuple[object, list[list[int]]]] = [
    (np.array(IDS), [IDS]),
    (np.array(IDS, dtype=np.uint32), [IDS]),
    (np.array([IDS, IDS[::-1]]), [IDS, IDS[::-1]]),
    ([np.array(IDS), IDS[:2]], [IDS, IDS[:2]]),
    (list(np.array(IDS)), [IDS]),
    ([IDS, list(np.array(IDS, dtype=np.int16))], [IDS, IDS]),
    (torch.tensor(IDS), [IDS]),
    (list(torch.tensor(IDS)), [IDS]),
    (array("q", IDS), [IDS]),
]


@pytest.mark.parametrize(("prompts", "ids"), ARRAYS)
def test_arrays_of_token_ids_are_prompts(llm: LLM, prompts: Any, ids: list[list[int]]) -> None:
    completions = llm.generate(prompts, greedy(1), show_progress=False)
    told = [list(completion.prompt_token_ids) for completion in completions]
    assert told == ids
    assert {type(token) for each in told for token in each} == {int}


def test_an_array_is_a_prompt_of_a_stream(llm: LLM) -> None:
    listed, as_array, as_tensors = (
        [delta.sampled for delta in llm.stream(prompt, greedy(3))]
        for prompt in (IDS, np.array(IDS), list(torch.tensor(IDS)))
    )
    assert listed == as_array == as_tensors


MISUSE: list[tuple[Callable[[LLM], object], str]] = [
    (
        lambda llm: llm.generate(None),
        "a prompt is a text or a list of token ids, or .* this is a NoneType",
    ),
    (lambda llm: llm.generate(5), "a prompt is a text .* this is a int"),
    (lambda llm: llm.generate(b"hi"), "a prompt is a text .* this is a bytes"),
    (lambda llm: llm.generate({"prompt": "hi"}), "a prompt is a text .* this is a dict"),
    (lambda llm: llm.generate([None]), r"prompts\[0\]: a prompt is a text .* not a NoneType"),
    (lambda llm: llm.generate(["hi", 1.5]), r"prompts\[1\]: a prompt is a text"),
    (lambda llm: llm.generate([["hi"]]), "the list has a str at index 0"),
    (lambda llm: llm.generate([[5, True]]), "the list has a bool at index 1"),
    (lambda llm: llm.generate(np.array([1.5, 2.5])), r"prompts\[0\]: a prompt is a text .* not a float"),
    (lambda llm: llm.generate([np.array([5.0])]), "the list has a float at index 0"),
    (lambda llm: llm.generate([np.array([True])]), "the list has a bool at index 0"),
    (lambda llm: llm.generate(np.array(5)), "a prompt is a text .* this is a ndarray"),
    (lambda llm: llm.generate(np.zeros((1, 1, 1), int)), "the list has a list at index 0"),
    (lambda llm: llm.generate([np.array([5]), 5]), "prompts mix token ids with texts or lists"),
    (lambda llm: llm.stream(np.array([[5]])), "the list has a list at index 0"),
    (lambda llm: llm.generate([[-1]]), "token ids must be from 0 to 262143"),
    (lambda llm: llm.generate([[10**9]]), "token ids must be from 0 to 262143"),
    (
        lambda llm: llm.generate("hi", {"max_tokens": 3}),
        "params must be SamplingParams, .* not a dict",
    ),
    (lambda llm: llm.generate("hi", 3), "params must be SamplingParams"),
    (lambda llm: llm.generate(["hi"], [3]), "params must be SamplingParams"),
    (lambda llm: llm.stream("hi", [SamplingParams()]), "params must be SamplingParams"),
    (lambda llm: llm.stream(None), "a prompt is a text"),
    (lambda llm: llm.stream("\ud800"), "lone surrogate"),
    (lambda llm: llm.chat(HELLO), "no chat template: use generate"),
    (lambda llm: llm.chat("Hello"), 'a conversation is a list of messages such as .*"role".* this is a str'),
    (lambda llm: llm.chat([]), "a conversation is a list .* this is an empty list"),
    (lambda llm: llm.chat(["Hello"]), "a conversation is a list .* this contains a str"),
    (lambda llm: llm.chat([[]]), "a conversation is a list .* this contains an empty list"),
    (lambda llm: llm.get_default_sampling_params(top_q=1), "did you mean top_"),
]


@pytest.mark.parametrize(("use", "message"), MISUSE)
def test_misuse_says_what_was_expected(llm: LLM, use: Callable[[Any], object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        use(llm)
    assert_idle(llm)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"model": 5}, ConfigError, "model must be a name, a path, a hub id or ModelSettings, not 5"),
        ({"model": "gema3-270m"}, ModelError, "did you mean gemma3-270m?"),
        (
            {"settings": {"max_running": 3}},
            ConfigError,
            "settings must be EngineSettings, not {'max_",
        ),
        ({"max_runing": 3}, ConfigError, "max_runing: no such setting; did you mean max_running?"),
        ({"max_running": "3"}, ConfigError, "max_running: must be a valid integer"),
        ({"port": 3}, ConfigError, "port: no such setting"),
        (
            {"tensor_parallel_size": 2},
            ConfigError,
            "tensor_parallel_size: not a setting of Legato: .",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_as_it_is_asked_for(
    kind: type[LLM | AsyncLLM], values: dict[str, Any], error: type[LegatoError], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**values)


def test_the_async_engine_serves_many_at_once(llm: LLM) -> None:
    async def use() -> None:
        async with AsyncLLM(llm.model) as model:
            texts = [delta.text async for delta in model.stream(FRANCE, greedy())]
            assert "".join(texts) == " the capital of the country of"
            one, other = await asyncio.gather(
                model.generate("The capital of France is", greedy()),
                model.generate(FRANCE, greedy(20, stop="capital")),
            )
            assert (one.token_ids, one.finish_reason) == (ANSWER, "length")
            assert (other.text, other.finish_reason) == (" the ", "stop")
            with pytest.raises(RequestError, match="params must be SamplingParams"):
                model.stream(FRANCE, {"max_tokens": 3})  # type: ignore[arg-type]
            stream = model.stream(FRANCE, greedy(100))
            assert (await anext(stream)).text == " the"
            await stream.aclose()  # type: ignore[attr-defined]
            while llm.model.engine.has_work:  # the abort is on its way
                await asyncio.sleep(0.01)
        with pytest.raises(UnavailableError, match="use it within `async with"):
            await model.generate(FRANCE)

    asyncio.run(asyncio.wait_for(use(), 60))
    assert_idle(llm)


def test_the_async_engine_answers_conversations(chatty: LLM) -> None:
    async def use() -> None:
        async with AsyncLLM(chatty.model) as model:
            assert await model.chat(HELLO, greedy(3)) == expected

    (expected,) = chatty.chat(HELLO, greedy(3))
    asyncio.run(asyncio.wait_for(use(), 60))
