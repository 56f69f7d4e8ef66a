"""/v1/completions, in this process: what an answer holds, whole and as a stream."""

import asyncio
import re
from typing import Any

import pytest
from server_rig import (
    BOS,
    EOS,
    MAX_LEN,
    ScriptedRunner,
    ask,
    build_service,
    events_of,
    in_process,
    letters,
    plain_runner,
    predicted,
    spelled,
    usage_of,
)

from legato.core.step_plan import SampleRow
from legato.text.fake import FakeTokenizer

HI = [BOS, 104, 105]


def complete(runner: Any = None, **body: object) -> dict[str, Any]:
    response = ask("/v1/completions", {"prompt": "hi", **body}, service=build_service(runner))
    assert response.status_code == 200, response.text
    return response.json()


def stream(runner: Any = None, **body: object) -> list[dict[str, Any]]:
    body = {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}, **body}
    response = ask("/v1/completions", body, service=build_service(runner))
    assert response.status_code == 200, response.text
    return events_of(response.text)


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The choices of one reply in a stream, put together as a whole answer has them."""
    parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    whole: dict[str, Any] = {"index": index, "text": "".join(part["text"] for part in parts)}
    whole |= {key: parts[-1][key] for key in ("finish_reason", "stop_reason") if key in parts[-1]}
    whole["logprobs"] = None
    if parts[0]["logprobs"] is not None:
        whole["logprobs"] = {
            key: [x for p in parts for x in p["logprobs"][key]] for key in parts[0]["logprobs"]
        }
    if "token_ids" in parts[0]:
        whole["token_ids"] = [id for part in parts for id in part["token_ids"]]
        whole["prompt_token_ids"] = parts[0]["prompt_token_ids"]
    return whole


def test_a_whole_answer_has_the_shape_of_openai() -> None:
    answer = complete(max_tokens=5)
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "fake/model",
        "choices": [{"index": 0, "text": "abcde", "logprobs": None, "finish_reason": "length"}],
        "usage": usage_of(3, 5),
    }


@pytest.mark.parametrize("prompt", ["hi", ["hi"], HI, [HI]], ids=["text", "texts", "ids", "lists of ids"])
def test_every_form_of_a_prompt_gives_the_same_reply(prompt: object) -> None:
    answer = complete(plain_runner(), prompt=prompt, max_tokens=8, ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == predicted(HI, 8)
    assert answer["choices"][0]["prompt_token_ids"] == HI
    assert answer["choices"][0]["text"] == FakeTokenizer().decode(predicted(HI, 8))


@pytest.mark.parametrize("num", [1, 5, 20])
def test_a_19_a_reply_cut_by_its_length_counts_every_token(num: int) -> None:
    usage = usage_of(3, num)
    answer = complete(max_tokens=num)
    assert (answer["usage"], answer["choices"][0]["finish_reason"]) == (usage, "length")
    assert stream(max_tokens=num)[-1]["usage"] == usage

    async def counted() -> str:
        async with in_process(build_service()) as client:
            await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": num})
            return (await client.get("/metrics")).text

    page = asyncio.run(counted())
    assert re.search(rf"^vllm:generation_tokens_total{{.*}} {num}\.0$", page, re.MULTILINE), page


def test_a_10_a_natural_end_is_stop_and_its_token_counts_in_both_modes() -> None:
    answer = complete(ScriptedRunner(spelled("ok")))
    assert answer["choices"][0] == {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == 3
    events = stream(ScriptedRunner(spelled("ok")))
    assert joined(events) == answer["choices"][0]
    assert events[-1]["usage"] == answer["usage"]


def test_a_22_a_reply_that_ends_at_once_is_empty() -> None:
    answer = complete(ScriptedRunner(spelled("")), logprobs=1)
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["<eos>"]
    assert answer["usage"] == usage_of(3, 1)
    assert joined(stream(ScriptedRunner(spelled("")), logprobs=1)) == answer["choices"][0]


@pytest.mark.parametrize("form", ["text", "ids"])
def test_b_25_choices_of_several_prompts_are_numbered_by_prompt_then_sample(form: str) -> None:
    texts = ["example 1", "example 2!"]
    prompts = texts if form == "text" else [[BOS, *text.encode()] for text in texts]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "best_of": 2, "echo": True, "max_tokens": 2}
    answer = complete(**body)
    expected = ["example 1ab", "example 1ab", "example 2!ab", "example 2!ab"]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(expected))
    assert answer["usage"] == usage_of(10 + 11, 8)
    events = stream(**body)
    assert [joined(events, index)["text"] for index in range(4)] == expected
    assert events[-1]["usage"] == answer["usage"]


def test_i_04_a_seed_gives_n_different_replies_that_repeat() -> None:
    def by_seed(row: SampleRow) -> int:
        assert row.params.seed is not None
        return ord("a") + (row.params.seed + row.num_generated) % 26

    def texts(n: int, seed: int) -> list[str]:
        answer = complete(ScriptedRunner(by_seed), n=n, seed=seed, max_tokens=4)
        return [choice["text"] for choice in answer["choices"]]

    assert len(set(texts(4, 5))) == 4
    assert texts(4, 5) == texts(4, 5)
    assert texts(1, 5) == texts(4, 5)[:1]
    assert len(set(texts(2, 2**63 - 1))) == 2


def test_i_04_replies_of_different_lengths_all_end() -> None:
    def lengths(row: SampleRow) -> int:
        index = int(row.request_id.rpartition("-")[2])
        return EOS if row.num_generated == 3 * index else ord("x")

    events = stream(ScriptedRunner(lengths), n=4, max_tokens=20)
    assert [joined(events, index)["text"] for index in range(4)] == ["", "xxx", "xxxxxx", "xxxxxxxxx"]
    assert [joined(events, index)["finish_reason"] for index in range(4)] == ["stop"] * 4


class TestLogprobs:
    """A-15: the arrays stay aligned, and the parts of a stream add up to the whole answer's."""

    @pytest.mark.parametrize(
        "script", [letters, spelled("é€! and \ufffd")], ids=["letters", "split characters"]
    )
    @pytest.mark.parametrize("stop", [None, "cde", ["zz", "d"]], ids=str)
    def test_the_arrays_are_aligned_and_a_stream_adds_up_to_them(self, script: Any, stop: object) -> None:
        body = {"logprobs": 2, "stop": stop, "max_tokens": 12, "return_token_ids": True}
        answer = complete(ScriptedRunner(script), **body)
        choice = answer["choices"][0]
        num_tokens = answer["usage"]["completion_tokens"]
        assert {len(values) for values in choice["logprobs"].values()} == {num_tokens}
        assert len(choice["token_ids"]) == num_tokens
        assert joined(stream(ScriptedRunner(script), **body)) == choice

    def test_the_sampled_token_is_listed_even_if_it_is_not_among_the_best(self) -> None:
        """The script overrules the runner's own choice, which stays at the top of the list."""
        logprobs = complete(logprobs=1, max_tokens=2)["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "b"]
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            assert len(top) == 2
            assert token in top

    def test_offsets_count_characters_and_tokens_within_one_show_their_bytes(self) -> None:
        logprobs = complete(ScriptedRunner(spelled("é!")), logprobs=0)["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!", "<eos>"]
        assert logprobs["text_offset"] == [0, 0, 1, 2]

    def test_tokens_behind_a_stop_string_keep_their_entries(self) -> None:
        choice = complete(logprobs=1, stop="cde", max_tokens=12)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
        assert choice["logprobs"]["tokens"] == list("abcde")
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


class Words(FakeTokenizer):
    """Its token `a` is two words, and there is a second end of text."""

    WORDS, END = ord("a"), 0

    def token_bytes(self, id: int, *, skip_special: bool = True) -> bytes:
        if id == self.END:
            return b""
        return b"hello world" if id == self.WORDS else super().token_bytes(id, skip_special=skip_special)

    @property
    def eos_ids(self) -> frozenset[int]:
        return super().eos_ids | {self.END}


@pytest.mark.parametrize(
    ("tokens", "stop", "text"),
    [
        ([33, Words.WORDS], "lo w", "!hel"),
        ([33, Words.WORDS, 33], "rld!", "!hello wo"),
        ([33, Words.WORDS, Words.END], None, "!hello world"),
    ],
    ids=["within a token", "begun within a token", "the second end of text"],
)
def test_a_15_an_end_within_a_token_leaves_every_sampled_token_its_entry(
    tokens: list[int], stop: str | None, text: str
) -> None:
    def answered(**body: object) -> Any:
        runner = ScriptedRunner(lambda row: [*tokens, 33, 33][row.num_generated])
        service = build_service(runner, tokenizer=Words())
        body = {"prompt": "hi", "stop": stop, "logprobs": 2, "max_tokens": 9, "return_token_ids": True} | body
        response = ask("/v1/completions", body, service=service)
        return events_of(response.text) if body.get("stream") else response.json()["choices"][0]

    choice = answered()
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert choice["token_ids"] == tokens
    assert {len(values) for values in choice["logprobs"].values()} == {len(tokens)}
    assert joined(answered(stream=True)) == choice


def test_text_that_may_become_a_stop_string_is_held_back_and_sends_no_empty_chunk() -> None:
    texts = [c["text"] for event in stream(stop=["cdeX"], max_tokens=8) for c in event["choices"]]
    assert texts == ["a", "b", "cdef", "g", "h"]


def test_a_stream_sends_one_chunk_for_each_token_when_ids_are_asked_for() -> None:
    events = stream(stop=["cdeX"], max_tokens=8, return_token_ids=True)[:-1]
    assert [event["choices"][0]["token_ids"] for event in events] == [[ord(letter)] for letter in "abcdefgh"]
    assert [event["choices"][0]["text"] for event in events] == ["a", "b", "", "", "", "cdef", "g", "h"]
    assert ["prompt_token_ids" in event["choices"][0] for event in events] == [True] + [False] * 7


def test_continuous_usage_counts_what_came_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(max_tokens=3, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


def test_ignore_eos_goes_on_to_the_length() -> None:
    answer = complete(ScriptedRunner(spelled("ok")), ignore_eos=True, max_tokens=7)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"] == "ok"
    assert answer["usage"]["completion_tokens"] == 7


def test_h_10_as_many_tokens_come_as_were_asked_for_however_long_the_prompt_is() -> None:
    """The server's half: `min_tokens` counts the reply alone, and the model would have ended after two."""
    body = {"prompt": "x" * 100, "min_tokens": 384, "max_tokens": 384, "ignore_eos": True}
    answer = complete(ScriptedRunner(spelled("ok")), **body)
    assert answer["usage"] == usage_of(101, 384)
    assert stream(ScriptedRunner(spelled("ok")), **body)[-1]["usage"] == usage_of(101, 384)


def test_b_22_min_tokens_holds_against_stop_strings() -> None:
    body = {"stop": ["b", "ef"], "min_tokens": 5, "max_tokens": 8}
    choice = complete(**body)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("abcd", "ef")
    assert "".join(c["text"] for event in stream(**body) for c in event["choices"]) == "abcd"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_of_the_clients_ends_the_reply_and_shows_no_text(ignore_eos: bool) -> None:
    choice = complete(stop_token_ids=[ord("c")], ignore_eos=ignore_eos)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")


@pytest.mark.parametrize(("num_prompt", "num_reply"), [(3, 16), (MAX_LEN - 5, 5)])
def test_without_max_tokens_a_reply_has_16_or_what_fits(num_prompt: int, num_reply: int) -> None:
    assert complete(prompt=[1] * num_prompt)["usage"]["completion_tokens"] == num_reply


def test_every_sampling_field_reaches_the_runner() -> None:
    runner = ScriptedRunner()
    asked = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2,
        "seed": -3,
    }
    complete(runner, **asked, logit_bias={"5": -100, "0": 1.5}, logprobs=4, stop_token_ids=[9])
    params = runner.plans[0].sample[0].params
    assert {name: getattr(params, name) for name in asked} == asked
    assert (params.logit_bias, params.logprobs) == (((5, -100.0), (0, 1.5)), 4)
    assert params.stop_token_ids == {9, EOS}


@pytest.mark.parametrize("top_k", [-1, 0, 258, 10_000])
def test_b_10_a_top_k_that_drops_nothing_is_off(top_k: int) -> None:
    runner = ScriptedRunner()
    complete(runner, top_k=top_k, top_p=0, min_p=1)
    assert runner.plans[0].sample[0].params.top_k == 0


def test_null_means_the_default_and_labels_are_accepted() -> None:
    nothing = dict.fromkeys(("temperature", "stop", "n", "best_of", "logprobs", "suffix", "seed", "user"))
    labels = {"user": "me", "metadata": {"run": "7"}, "store": False, "service_tier": "auto"}
    assert complete(**{**nothing, **labels}, max_tokens=2)["choices"][0]["text"] == "ab"
