"""Prompts that are asked about: echo, their log-probabilities, no reply at all; whole and as a stream."""

import asyncio
import threading
from typing import Any

import pytest
from server_rig import (
    BOS,
    VOCAB,
    ScriptedRunner,
    ask,
    build_service,
    events_of,
    in_process,
    plain_runner,
    usage_of,
)

from legato.engine.fake import next_token
from legato.server.routes.completions import CompletionFormatter

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Your answer: Yes é"
IDS = [BOS, *PROMPT.encode()]


def complete(**body: object) -> dict[str, Any]:
    response = ask(COMPLETIONS, {"prompt": PROMPT, **body}, service=build_service(plain_runner()))
    assert response.status_code == 200, response.text
    return response.json()


def stream(**body: object) -> list[dict[str, Any]]:
    body = {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}, **body}
    response = ask(COMPLETIONS, body, service=build_service(plain_runner()))
    assert response.status_code == 200, response.text
    return events_of(response.text)


def said(ids: list[int]) -> list[float | None]:
    """Log-probabilities of a prompt's tokens, by hand."""
    return [None, *(-float(next_token(ids[:i], VOCAB) != ids[i]) for i in range(1, len(ids)))]


class TestEcho:
    def test_b_05_scoring_without_a_reply_as_evaluation_harnesses_do_it(self) -> None:
        answer = complete(echo=True, logprobs=1, max_tokens=0)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(IDS)}
        assert logprobs["token_logprobs"] == said(IDS)
        assert logprobs["tokens"][:3] == ["<bos>", "Y", "o"]
        assert logprobs["top_logprobs"][0] is None
        assert all(
            token in top
            for token, top in list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[1:]
        )
        assert answer["usage"] == usage_of(len(IDS), 0)

    @pytest.mark.parametrize("prompt", [PROMPT, IDS, [PROMPT, "b"]], ids=["text", "ids", "two"])
    def test_b_05_a_stream_adds_up_to_the_whole_answer(self, prompt: object) -> None:
        for num in (0, 4):
            body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": num, "n": 2}
            whole = complete(**body, ignore_eos=True)
            *events, last = stream(**body, ignore_eos=True)
            assert last["usage"] == whole["usage"]
            for choice in whole["choices"]:
                parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
                assert "".join(part["text"] for part in parts) == choice["text"]
                for key, values in choice["logprobs"].items():
                    assert [x for part in parts for x in part["logprobs"][key]] == values
                assert [part["finish_reason"] for part in parts][-1] == "length"

    def test_offsets_point_into_the_text_of_prompt_and_reply(self) -> None:
        choice = complete(echo=True, logprobs=0, max_tokens=5, ignore_eos=True)["choices"][0]
        offsets, text = choice["logprobs"]["text_offset"], choice["text"]
        assert offsets[0] == offsets[1] == 0, "BOS adds no text"
        for token, offset in list(zip(choice["logprobs"]["tokens"], offsets, strict=True))[1:]:
            if not token.startswith(("bytes:", "<")):
                assert text[offset : offset + len(token)] == token
        assert offsets[len(IDS)] == len(PROMPT)

    def test_a_prompt_that_ends_within_a_character_does_not_move_the_replys_offsets(self) -> None:
        answer = complete(prompt=[104, 0xC3], echo=True, logprobs=0, max_tokens=2, ignore_eos=True)
        choice = answer["choices"][0]
        assert choice["text"].startswith("h\ufffd")
        assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]

    def test_special_tokens_are_echoed_with_logprobs_only_if_they_are_not_skipped(self) -> None:
        body = {"prompt": "a<eos>b", "echo": True, "max_tokens": 0}
        texts = [
            complete(**body, **more)["choices"][0]["text"]
            for more in ({}, {"logprobs": 0}, {"logprobs": 0, "skip_special_tokens": False})
        ]
        assert texts == ["a<eos>b", "ab", "<bos>a<eos>b"]

    def test_without_logprobs_nothing_but_the_prompt_comes_back(self) -> None:
        answer = complete(echo=True, max_tokens=0)
        assert answer["choices"] == [
            {"index": 0, "text": PROMPT, "logprobs": None, "finish_reason": "length"}
        ]


class TestPromptLogprobs:
    def test_they_have_the_form_of_vllm(self) -> None:
        choice = complete(prompt=[5, 5, 9], prompt_logprobs=1, max_tokens=1)["choices"][0]
        assert choice["prompt_logprobs"] == [
            None,
            {"5": {"logprob": 0.0, "rank": 1, "decoded_token": "\x05"}},
            {
                "11": {"logprob": 0.0, "rank": 1, "decoded_token": "\x0b"},
                "9": {"logprob": -1.0, "rank": 2, "decoded_token": "\t"},
            },
        ]

    @pytest.mark.parametrize("num_top", [0, 1])
    def test_a_stream_has_them_once_for_each_choice(self, num_top: int) -> None:
        body = {"prompt": [[5, 5, 9], [1]], "n": 2, "prompt_logprobs": num_top, "max_tokens": 2}
        whole = complete(**body)
        told: dict[int, list[Any]] = {}
        for event in stream(**body):
            for choice in event["choices"]:
                if "prompt_logprobs" in choice:
                    told.setdefault(choice["index"], []).append(choice["prompt_logprobs"])
        assert told == {choice["index"]: [choice["prompt_logprobs"]] for choice in whole["choices"]}
        assert told[2] == [[None]]

    def test_no_reply_and_another_number_than_for_the_echo(self) -> None:
        choice = complete(echo=True, logprobs=0, prompt_logprobs=1, max_tokens=0)["choices"][0]
        assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])
        said_first = [
            max(entry, key=lambda id: entry[id]["logprob"]) for entry in choice["prompt_logprobs"][1:]
        ]
        assert said_first == [str(next_token(IDS[:end], VOCAB)) for end in range(1, len(IDS))]

    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_chat_has_them_beside_its_choices(self, streamed: bool) -> None:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "prompt_logprobs": 0,
            "max_tokens": 2,
            "n": 2,
            "return_token_ids": True,
            "stream": streamed,
        }
        response = ask(CHAT, body, service=build_service(plain_runner()))
        answers = events_of(response.text) if streamed else [response.json()]
        told = [answer["prompt_logprobs"] for answer in answers if "prompt_logprobs" in answer]
        assert len(told) == 1
        ids = answers[0]["prompt_token_ids"]
        assert told[0][0] is None
        assert [next(iter(entry)) for entry in told[0][1:]] == [str(id) for id in ids[1:]]

    def test_the_prompt_is_computed_anew_and_usage_says_so(self) -> None:
        body = {"prompt": [[1] * 40] * 2, "prompt_logprobs": 0, "max_tokens": 1}
        assert complete(**body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_e_03_cold_and_warm_give_the_same() -> None:
    body = {"prompt": [7] * 33, "prompt_logprobs": 1, "max_tokens": 1}

    async def twice() -> list[Any]:
        async with in_process(build_service(plain_runner())) as client:
            answers = [(await client.post(COMPLETIONS, json=body)).json() for _ in range(2)]
            return [answer["choices"] for answer in answers]

    cold, warm = asyncio.run(twice())
    assert cold == warm
    assert len(cold[0]["prompt_logprobs"]) == 33


@pytest.mark.parametrize("streamed", [False, True])
def test_a_long_prompts_scores_are_worded_off_the_event_loop(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of entries take longer to write than a token of somebody else's may wait."""
    threads: list[bool] = []
    whole, chunks = CompletionFormatter.complete, CompletionFormatter.chunks

    def note(method: Any) -> Any:
        def noted(*arguments: Any, **more: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return method(*arguments, **more)

        return noted

    monkeypatch.setattr(CompletionFormatter, "complete", note(whole))
    monkeypatch.setattr(CompletionFormatter, "chunks", note(chunks))
    body = {"prompt": [7] * 400, "prompt_logprobs": 1, "max_tokens": 2, "stream": streamed}
    response = ask(COMPLETIONS, body, service=build_service(plain_runner()))
    assert response.status_code == 200
    assert threads == ([False, True] if streamed else [False])


class TestTruncation:
    """B-14: only when it was asked for, and then reported."""

    def test_the_last_tokens_are_kept_and_usage_says_how_many_went(self) -> None:
        body = {"prompt": [[1] * 600, [2] * 5], "max_tokens": 2, "truncate_prompt_tokens": 10}
        answer = complete(**body, return_token_ids=True)
        assert [c["prompt_token_ids"] for c in answer["choices"]] == [[1] * 10, [2] * 5]
        assert answer["usage"]["prompt_tokens"] == 15
        assert answer["usage"]["prompt_tokens_details"]["truncated_tokens"] == 590
        assert stream(**body)[-1]["usage"]["prompt_tokens_details"]["truncated_tokens"] == 590

    def test_minus_1_keeps_what_fits_beside_the_reply(self) -> None:
        answer = complete(prompt=[1] * 600, max_tokens=12, truncate_prompt_tokens=-1)
        assert answer["usage"]["prompt_tokens"] == 500

    def test_the_echo_is_of_what_was_kept(self) -> None:
        answer = complete(prompt="abcdef", echo=True, max_tokens=0, truncate_prompt_tokens=2)
        assert answer["choices"][0]["text"] == "ef"

    def test_a_chat_is_truncated_too(self) -> None:
        body = {"messages": [{"role": "user", "content": "x" * 600}], "truncate_prompt_tokens": 20}
        response = ask(CHAT, {**body, "max_tokens": 1}, service=build_service(ScriptedRunner()))
        assert response.json()["usage"]["prompt_tokens"] == 20
