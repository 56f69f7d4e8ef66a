"""Every field of OpenAI's and vLLM's requests is obeyed, or refused by name unless it asks for nothing."""

import typing
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import chat_completion_stream_options_param as stream_params
from openai.types.chat import completion_create_params as chat_params
from server_rig import BOS, EOS, ScriptedRunner, ask, build_service, events_of, letters, spelled

from legato.core.step_plan import SampleRow
from legato.server.schema.bodies import ChatBody, CompletionBody, StreamOptions
from legato.text.chat import ChatTemplate

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STARTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}
KINDS = {COMPLETIONS: CompletionBody, CHAT: ChatBody}
each_path = pytest.mark.parametrize("path", KINDS)


def fields_of(module: Any) -> set[str]:
    """All that a request may hold, streaming or not, by the types of the official client."""
    kinds = (module.CompletionCreateParamsNonStreaming, module.CompletionCreateParamsStreaming)
    return {name for kind in kinds for name in typing.get_type_hints(kind)}


# vLLM 0.11, protocol.py: the sampling and extra parameters of both requests.
VLLM_BOTH = {
    *("use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "bad_words"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids"),
    *("add_special_tokens", "priority", "cache_salt", "return_token_ids", "logits_processors"),
}
VLLM_CHAT = {
    *("echo", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
    "documents",
}
FIELDS = [
    *((COMPLETIONS, name) for name in sorted({*fields_of(completion_params), *VLLM_BOTH})),
    *((CHAT, name) for name in sorted({*fields_of(chat_params), *VLLM_BOTH, *VLLM_CHAT})),
]


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_b_19_every_field_is_known(path: str, name: str) -> None:
    """Declared as obeyed, listed with the values that ask for nothing, or a label: never "unknown"."""
    kind = KINDS[path]
    assert sum(name in known for known in (kind.model_fields, kind.neutral, kind.labels)) == 1


INSTRUCTIONS = [(path, name) for path, name in FIELDS if name not in KINDS[path].labels]


@pytest.mark.parametrize(("path", "name"), INSTRUCTIONS)
def test_b_19_a_value_that_nobody_could_mean_is_refused_by_the_fields_name(path: str, name: str) -> None:
    response = ask(path, {**STARTS[path], name: [{"no": "such value"}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"].split(".")[0].split("[")[0] == name


@each_path
def test_b_19_neutral_values_are_taken_and_change_nothing(path: str) -> None:
    plain = ask(path, STARTS[path]).json()
    for name, values in KINDS[path].neutral.items():
        for value in values:
            answer = ask(path, {**STARTS[path], name: value}).json()
            assert answer["choices"] == plain["choices"], (name, value)


def test_every_stream_option_is_known() -> None:
    names = {*typing.get_type_hints(stream_params.ChatCompletionStreamOptionsParam), "continuous_usage_stats"}
    assert names <= {*StreamOptions.model_fields, *StreamOptions.neutral}


@pytest.mark.parametrize(
    ("path", "method"), [("/v1/responses", "POST"), ("/v1/embeddings", "POST"), ("/v1/responses/r1", "GET")]
)
def test_endpoints_that_are_not_there_say_so_in_the_shape_of_openai(path: str, method: str) -> None:
    response = ask(path, {"model": "fake/model", "input": "hi"}, method=method)
    assert response.status_code == 404
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


# -- fields of vLLM, obeyed -------------------------------------------------------------------------------


def chosen(path: str, body: dict[str, Any], runner: ScriptedRunner | None = None) -> dict[str, Any]:
    response = ask(path, {**STARTS[path], **body}, service=build_service(runner))
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return {**choice, "text": choice["text"] if path == COMPLETIONS else choice["message"]["content"]}


def streamed(path: str, body: dict[str, Any], runner: ScriptedRunner | None = None) -> str:
    response = ask(path, {**STARTS[path], **body, "stream": True}, service=build_service(runner))
    choices = [choice for event in events_of(response.text) for choice in event["choices"]]
    return "".join(c["text"] if path == COMPLETIONS else c["delta"].get("content", "") for c in choices)


@each_path
@pytest.mark.parametrize(
    ("body", "script", "text"),
    [
        ({"stop": ["bc"], "include_stop_str_in_output": True}, letters, "abc"),
        ({"stop": ["bc", "c"], "include_stop_str_in_output": True}, letters, "abc"),
        ({"stop": ["bc"]}, letters, "a"),
        ({"stop_token_ids": [99], "include_stop_str_in_output": True}, letters, "abc"),
        ({"skip_special_tokens": False, "ignore_eos": True}, spelled("a"), "a<eos><eos><eos>"),
        ({"skip_special_tokens": False}, spelled("a"), "a"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, spelled("a"), "a<eos>"),
        ({"include_stop_str_in_output": True}, spelled("a"), "a"),
    ],
)
def test_what_ends_a_reply_and_special_tokens_are_shown_as_asked(
    path: str, body: dict[str, Any], script: Any, text: str
) -> None:
    assert chosen(path, body, ScriptedRunner(script))["text"] == text
    assert streamed(path, body, ScriptedRunner(script)) == text


@each_path
def test_ids_that_are_allowed_and_words_that_are_not_reach_the_runner(path: str) -> None:
    runner = ScriptedRunner()
    chosen(path, {"allowed_token_ids": [97, 98], "bad_words": ["no", "x"]}, runner)
    params = runner.plans[0].sample[0].params
    assert params.allowed_token_ids == {97, 98}
    assert params.bad_words == ((110, 111), (32, 110, 111), (120,), (32, 120))


@each_path
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [258]}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": [chr(i) for i in range(128)], "stop_token_ids": [*range(128)], "min_tokens": 1}, None),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_leaves_nothing_to_choose_is_refused(path: str, body: dict[str, Any], param: str | None) -> None:
    """One that would fail its step would take its batch-mates with it."""
    response = ask(path, {**STARTS[path], **body})
    assert response.status_code == (200 if param is None else 400)
    if param is not None:
        assert response.json()["error"]["param"] == param


# -- how a chat's prompt is made --------------------------------------------------------------------------

HALF = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so I "}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<eos>{% endfor %}"


def prompt_of(body: dict[str, Any], template: str | None = None) -> bytes:
    service = build_service()
    if template is not None:
        service = build_service(chat_template=ChatTemplate(template, bos_token="", eos_token="<eos>"))
    answer = ask(CHAT, {"max_tokens": 1, "return_token_ids": True, **body}, service=service)
    assert answer.status_code == 200, answer.text
    return bytes(id if id < 256 else 0 for id in answer.json()["prompt_token_ids"])


def test_the_last_message_is_left_open_to_be_continued() -> None:
    body = {"messages": HALF, "continue_final_message": True}
    assert prompt_of(body, TURNS) == b"<user>hi\0<assistant>so I "
    assert prompt_of({**body, "add_generation_prompt": False}, TURNS) == b"<user>hi\0<assistant>so I "


@pytest.mark.parametrize("template", ["nothing", "{{ messages[-1].content }}{{ messages[-1].content }}"])
def test_a_template_that_does_not_write_the_last_message_once_cannot_be_continued(template: str) -> None:
    service = build_service(chat_template=ChatTemplate(template, bos_token="", eos_token=""))
    answer = ask(CHAT, {"messages": HALF, "continue_final_message": True}, service=service)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")


def test_a_message_is_either_continued_or_followed_by_a_new_one() -> None:
    body = {"messages": HALF, "continue_final_message": True, "add_generation_prompt": True}
    answer = ask(CHAT, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")


def test_an_echo_puts_the_assistants_words_before_the_reply() -> None:
    body = {"messages": HALF, "continue_final_message": True, "echo": True}
    assert chosen(CHAT, body)["text"] == "so I abcd"
    assert streamed(CHAT, body) == "so I abcd"
    assert chosen(CHAT, {"echo": True})["text"] == "abcd", "the last message is the user's"


@pytest.mark.parametrize("wanted", [True, False])
def test_special_tokens_are_added_as_asked(wanted: bool) -> None:
    template = "{{ messages[0].content }}"
    body = {**STARTS[CHAT], "add_special_tokens": wanted}
    assert prompt_of(body, template) == (b"\0hi" if wanted else b"hi")
    body = {**STARTS[COMPLETIONS], "add_special_tokens": wanted, "return_token_ids": True}
    ids = ask(COMPLETIONS, body).json()["choices"][0]["prompt_token_ids"]
    assert ids == [*([BOS] if wanted else []), 104, 105]


def test_bad_words_end_where_the_reply_would_complete_them() -> None:
    """The runner's rows know the reply, as far as a word of several tokens needs it."""
    rows: list[SampleRow] = []

    def script(row: SampleRow) -> int:
        rows.append(row)
        return letters(row)

    chosen(COMPLETIONS, {"bad_words": ["xy"]}, ScriptedRunner(script))
    assert [row.generated for row in rows] == [(), (97,), (97, 98), (97, 98, 99)]
