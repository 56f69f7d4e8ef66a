"""`max_tokens` is a limit, not a demand: above the room that the prompt leaves it is that room, and a header
says so."""

from typing import Any

import pytest
from server_rig import MAX_LEN, ask, events_of

from legato.server.generation.notices import MAX_CHARS, NOTICE_HEADER, notice_headers

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_PROMPT = MAX_LEN - 12


def ask_for(path: str, num_prompt: int, **fields: Any) -> Any:
    """A request whose prompt has `num_prompt` tokens."""
    frame = len("<user><assistant>") + 1
    start: dict[str, Any] = {"prompt": [1] * num_prompt}
    if path == CHAT:
        start = {"messages": [{"role": "user", "content": "x" * (num_prompt - frame)}]}
    return ask(path, {**start, **fields})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_n_08_a_limit_above_the_room_left_is_that_room_and_a_header_says_so(
    path: str, name: str, stream: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = ask_for(path, NUM_PROMPT, stream=stream, **{name: 65535}, **options)
    assert answer.status_code == 200, answer.text
    usage = events_of(answer.text)[-1]["usage"] if stream else answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_PROMPT, 12)
    assert answer.headers[NOTICE_HEADER] == f"{name}: 65535 asked for, 12 possible after the prompt"


@pytest.mark.parametrize("num_asked", [1, 11, 12])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_limit_that_fits_is_kept_without_a_word(path: str, num_asked: int) -> None:
    answer = ask_for(path, NUM_PROMPT, max_tokens=num_asked)
    assert answer.json()["usage"]["completion_tokens"] == num_asked
    assert NOTICE_HEADER not in answer.headers


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_n_08_minus_one_is_no_limit(path: str) -> None:
    """Also where a missing one is 16 tokens."""
    answer = ask_for(path, MAX_LEN - 40, max_tokens=-1)
    assert answer.json()["usage"]["completion_tokens"] == 40
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert NOTICE_HEADER not in answer.headers


def test_each_of_several_prompts_gets_its_own_room() -> None:
    prompts = [[1] * (MAX_LEN - 3), [1] * (MAX_LEN - 7)]
    answer = ask(COMPLETIONS, {"prompt": prompts, "max_tokens": 5, "return_token_ids": True})
    assert [len(choice["token_ids"]) for choice in answer.json()["choices"]] == [3, 5]
    assert answer.headers[NOTICE_HEADER] == "max_tokens: 5 asked for, 3 possible after the prompt"


@pytest.mark.parametrize("asked", [{}, {"max_tokens": -1}, {"max_tokens": MAX_LEN}, {"max_tokens": 65535}])
def test_a_limit_that_is_no_demand_takes_no_room_from_a_prompt_that_is_cut_to_fit(asked: Any) -> None:
    answer = ask_for(COMPLETIONS, 2 * MAX_LEN, truncate_prompt_tokens=-1, **asked)
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (MAX_LEN - 1, 1)


def test_a_limit_that_can_be_met_leaves_its_room() -> None:
    answer = ask_for(COMPLETIONS, 2 * MAX_LEN, truncate_prompt_tokens=-1, max_tokens=12)
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_PROMPT, 12)


def test_more_tokens_than_there_is_room_for_cannot_be_the_least() -> None:
    answer = ask_for(COMPLETIONS, NUM_PROMPT, max_tokens=65535, min_tokens=13)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")
    assert "13 is above the 12" in answer.json()["error"]["message"]


def test_a_notice_can_break_no_header_whatever_it_quotes() -> None:
    (told,) = notice_headers(["a\r\nSet-Cookie: b", "\ud83d caf\u00e9 " * 1000]).values()
    assert told.startswith("a\\r\\nSet-Cookie: b; \\ud83d caf\\xe9 ")
    assert told.isascii()
    assert told.isprintable()
    assert len(told) <= 6 * MAX_CHARS
    assert notice_headers([]) == {}
