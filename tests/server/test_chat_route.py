"""/v1/chat/completions, in this process: prompts from messages, and answers as messages."""

from typing import Any

import pytest
from server_rig import BOS, MAX_LEN, ScriptedRunner, ask, build_service, events_of, letters, spelled, usage_of

from legato.text.chat import BUILTIN_TEMPLATES, ChatTemplate
from legato.text.fake import FakeTokenizer

USER = [{"role": "user", "content": "hi"}]
PROMPT = [BOS, *b"<user>hi<assistant>"]


def chat(runner: Any = None, messages: Any = USER, **body: object) -> dict[str, Any]:
    body = {"messages": messages, **body}
    response = ask("/v1/chat/completions", body, service=build_service(runner))
    assert response.status_code == 200, response.text
    return response.json()


def stream(runner: Any = None, **body: object) -> list[dict[str, Any]]:
    body = {"messages": USER, "stream": True, **body}
    response = ask("/v1/chat/completions", body, service=build_service(runner))
    assert response.status_code == 200, response.text
    return events_of(response.text)


def test_a_whole_answer_has_the_shape_of_openai() -> None:
    answer = chat(max_tokens=3)
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    message = {"role": "assistant", "content": "abc", "refusal": None}
    assert answer == {
        "object": "chat.completion",
        "model": "fake/model",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
        "usage": usage_of(len(PROMPT), 3),
    }


def test_a_stream_is_a_role_then_tokens_and_the_last_one_carries_the_end() -> None:
    choices = [event["choices"][0] for event in stream(max_tokens=3)]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": "c"},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]


def test_a_22_a_reply_that_ends_at_once_has_empty_content_and_not_null() -> None:
    answer = chat(ScriptedRunner(spelled("")), logprobs=True)
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    choices = [event["choices"][0] for event in stream(ScriptedRunner(spelled("")))]
    assert [choice["finish_reason"] for choice in choices] == [None, "stop"]
    assert choices[-1]["delta"] == {"content": ""}


@pytest.mark.parametrize(
    ("messages", "body", "prompt"),
    [
        (USER, {}, b"<user>hi<assistant>"),
        (USER, {"add_generation_prompt": False}, b"<user>hi"),
        (
            [{"role": "system", "content": "be"}, *USER, {"role": "assistant", "content": "yes"}],
            {"add_generation_prompt": False},
            b"<system>be<user>hi<assistant>yes",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]}],
            {},
            b"<user>one\ntwo<assistant>",
        ),
    ],
    ids=["one message", "without generation prompt", "three messages", "text parts"],
)
def test_the_prompt_is_the_templates_with_exactly_one_bos(
    messages: object, body: dict[str, object], prompt: bytes
) -> None:
    answer = chat(messages=messages, max_tokens=1, return_token_ids=True, **body)
    assert answer["prompt_token_ids"] == [BOS, *prompt]


def test_template_variables_of_the_client_reach_the_template() -> None:
    template = ChatTemplate("{{ style }}{{ messages[0].content }}", bos_token="", eos_token="")
    body = {"messages": USER, "chat_template_kwargs": {"style": "calm "}, "return_token_ids": True}
    answer = ask("/v1/chat/completions", body, service=build_service(chat_template=template)).json()
    assert bytes(answer["prompt_token_ids"]) == b"calm hi"


def test_an_assistants_message_from_an_earlier_answer_can_be_sent_back() -> None:
    earlier = chat(max_tokens=2)["choices"][0]["message"]
    nulls = dict.fromkeys(("audio", "function_call", "tool_calls", "annotations"))
    assert chat(messages=[*USER, {**earlier, **nulls}, *USER], max_tokens=2)["choices"]


def test_without_max_tokens_a_reply_may_take_all_the_room() -> None:
    answer = chat()
    assert answer["usage"]["total_tokens"] == MAX_LEN
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "names", [["max_tokens"], ["max_completion_tokens"], ["max_tokens", "max_completion_tokens"]]
)
def test_b_19_both_names_of_the_length_work(names: list[str]) -> None:
    assert chat(**dict.fromkeys(names, 5))["usage"]["completion_tokens"] == 5


def test_several_replies_have_their_own_role_and_text() -> None:
    answer = chat(n=3, max_tokens=2)
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(i, "ab") for i in range(3)]
    choices = [event["choices"][0] for event in stream(n=3, max_tokens=2)]
    for index in range(3):
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]


@pytest.mark.parametrize("script", [letters, spelled("é€! \u2028")], ids=["letters", "split characters"])
def test_a_15_logprobs_hold_every_token_with_its_bytes_and_a_stream_adds_up(script: Any) -> None:
    body = {"logprobs": True, "top_logprobs": 1, "max_tokens": 9, "stop": "fgh", "return_token_ids": True}
    answer = chat(ScriptedRunner(script), **body)
    choice, content = answer["choices"][0], answer["choices"][0]["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    tokenizer = FakeTokenizer()
    for id, entry in zip(choice["token_ids"], content, strict=True):
        assert bytes(entry["bytes"]) == tokenizer.token_bytes(id, skip_special=False)
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert [set(top) for top in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}]
    choices = [event["choices"][0] for event in stream(ScriptedRunner(script), **body)]
    assert [entry for c in choices for entry in c["logprobs"]["content"]] == content
    assert [id for c in choices for id in c["token_ids"]] == choice["token_ids"]
    assert "".join(c["delta"]["content"] for c in choices) == choice["message"]["content"]


def test_a_stream_with_ids_names_the_prompt_once() -> None:
    events = stream(max_tokens=2, return_token_ids=True)
    assert [event.get("prompt_token_ids") for event in events] == [PROMPT, None, None]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_base_model_says_how_to_get_a_chat_template(streamed: bool) -> None:
    body = {"messages": USER, "stream": streamed}
    response = ask("/v1/chat/completions", body, service=build_service(chat_template=None))
    assert response.status_code == 400
    assert "--chat-template" in response.json()["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([*USER, *USER], "roles must alternate user/assistant, beginning with user"),
        ([{"role": "system", "content": "secret"}, *USER], "no system here"),
    ],
)
def test_f_19_a_template_that_refuses_the_messages_is_the_clients_fault(
    messages: list[dict[str, str]], complaint: str, streamed: bool
) -> None:
    """The template's own message and nothing of its source or of the prompt, before any event."""
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    template = ChatTemplate(no_system + BUILTIN_TEMPLATES["mistral"], bos_token="", eos_token="")
    body = {"messages": messages, "stream": streamed}
    response = ask("/v1/chat/completions", body, service=build_service(chat_template=template))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert error["message"] == f"chat template: {complaint}"
