"""What is refused, in this process: always 400 (or 404) in OpenAI's shape, the same for streams, with the
field's name, before anything is computed."""

import asyncio
from typing import Any

import pytest
from server_rig import MAX_LEN, ScriptedRunner, ask, build_service, in_process, json_bytes

from legato.server.schema.bodies import ChatBody, CompletionBody
from legato.text.fake import FakeTokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def refused(
    path: str, body: object = None, *, content: bytes | None = None, status: int = 400
) -> dict[str, Any]:
    """The error of a request that no step was run for."""
    runner = ScriptedRunner()
    headers = {"Content-Type": "application/json"}
    response = ask(path, body, content=content, headers=headers, service=build_service(runner))
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert runner.plans == []
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]
    return error


def refused_both_ways(path: str, body: dict[str, Any]) -> dict[str, Any]:
    error = refused(path, body)
    assert refused(path, {**body, "stream": True}) == error
    return error


BOTH: list[tuple[str, str, object, str]] = [
    ("B-01", "logit_bias", {"258": 1}, "257"),
    ("B-01", "logit_bias", {"-1": 1}, "token ids"),
    ("B-01", "logit_bias", {"abc": 1}, "token ids"),
    ("B-01", "logit_bias", {"01": 1}, "token ids"),
    ("B-01", "logit_bias", {"²": 1}, "token ids"),
    ("B-01", "logit_bias.1", {"1": 1000}, "100"),
    ("B-01", "logit_bias.1", {"1": "5"}, "number"),
    ("B-01", "logit_bias", {str(i): 0 for i in range(1025)}, "1024"),
    ("B-06", "max_tokens", 0, "1"),
    ("B-06", "max_tokens", -5, "-1"),
    ("B-06", "max_tokens", 2.5, "integer"),
    ("B-06", "max_tokens", "10", "integer"),
    ("B-06", "max_tokens", True, "integer"),
    ("B-23", "max_tokens", 10**12, "2147483647"),
    ("B-06", "max_completion_tokens", 0, "1"),
    ("B-06", "min_tokens", -1, "0"),
    ("B-06", "min_tokens", 513, "above"),
    ("B-08", "temperature", 999999, "2"),
    ("B-08", "temperature", -1, "0"),
    ("B-08", "temperature", "hot", "number"),
    ("B-08", "top_p", -1, "0"),
    ("B-08", "top_p", 1.01, "1"),
    ("B-08", "min_p", 2, "1"),
    ("B-08", "repetition_penalty", 0, "0.01"),
    ("B-08", "presence_penalty", 3, "2"),
    ("B-08", "frequency_penalty", -3, "2"),
    ("B-10", "top_k", -2, "-1"),
    ("B-23", "top_k", 2**40, "2147483647"),
    ("B-23", "seed", 2**63, "9223372036854775807"),
    ("B-23", "seed", -(2**63) - 1, "9223372036854775808"),
    ("B-23", "seed", 1.5, "integer"),
    ("B-23", "seed", "7", "integer"),
    ("B-23", "seed", True, "integer"),
    ("J-03", "n", 0, "1"),
    ("J-03", "n", 129, "128"),
    ("J-03", "n", 10_000, "128"),
    ("J-03", "n", 10**30, "2147483647"),
    ("J-03", "best_of", 10**6, "not supported"),
    ("B-21", "stop", "", "empty"),
    ("B-21", "stop", [""], "empty"),
    ("B-21", "stop", ["", "END"], "empty"),
    ("B-21", "stop", [str(i) for i in range(1000)], "16"),
    ("B-21", "stop", "x" * 1_000_000, "1000"),
    ("B-21", "stop[0]", [5], "string"),
    ("B-03", "stop_token_ids", [258], "257"),
    ("B-03", "stop_token_ids", [-1], "257"),
    ("B-03", "stop_token_ids", [1] * 129, "128"),
    ("B-15", "model", 5, "string"),
    ("B-19", "zebra", 1, "unknown field"),
    ("B-19", "zebra", None, "unknown field"),
    ("B-19", "use_beam_search", True, "not supported"),
    ("B-19", "kv_transfer_params", {"do_remote_decode": True}, "not supported"),
    ("B-19", "nvext.ignore_eos", {"ignore_eos": True}, "not supported"),
    ("B-19", "ignore_eos", 1, "boolean"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("case", "param", "value", "hint"), BOTH)
def test_a_shared_field_out_of_range_is_refused_by_name(
    path: str, case: str, param: str, value: object, hint: str
) -> None:
    field = param.split(".")[0].split("[")[0]
    start = {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}
    error = refused_both_ways(path, {**start, field: value})
    assert error["param"] == param, case
    assert param in error["message"] or field == "max_tokens" or field == "stop"
    assert hint in error["message"]


COMPLETION_ONLY: list[tuple[str, str, dict[str, Any], str]] = [
    ("B-03", "prompt", {"prompt": [1, 5279552648203111001]}, "257"),
    ("B-03", "prompt", {"prompt": [-1]}, "257"),
    ("B-03", "prompt", {"prompt": [258]}, "257"),
    ("B-03", "prompt", {"prompt": [[1, 2], [258]]}, "257"),
    ("B-03", "prompt", {"prompt": [True]}, "only"),
    ("B-03", "prompt", {"prompt": [1.0]}, "only"),
    ("B-03", "prompt", {"prompt": ["a", 1]}, "only"),
    ("B-03", "prompt", {"prompt": [[1], "a"]}, "only"),
    ("B-03", "prompt", {"prompt": [[[1]]]}, "only"),
    ("B-03", "prompt", {"prompt": 5}, "text"),
    ("B-03", "prompt", {"prompt": {"a": 1}}, "text"),
    ("B-07", "prompt", {"prompt": []}, "empty"),
    ("B-07", "prompt", {"prompt": [[]]}, "empty"),
    ("B-07", "prompt", {"prompt": [[1], []]}, "empty"),
    ("B-07", "prompt", {}, "required"),
    ("B-07", "prompt", {"prompt": None}, "required"),
    ("B-05", "max_tokens", {"prompt": "a", "max_tokens": 0}, "at least 1"),
    ("B-05", "max_tokens", {"prompt": "a", "logprobs": 1, "max_tokens": 0}, "at least 1"),
    ("B-05", "max_completion_tokens", {"prompt": "a", "max_completion_tokens": 0}, "at least 1"),
    ("B-05", "max_tokens", {"prompt": "a", "echo": True, "max_tokens": -2}, "-1"),
    ("B-26", "logprobs", {"prompt": "a", "logprobs": 25}, "20"),
    ("B-26", "logprobs", {"prompt": "a", "logprobs": -1}, "0"),
    ("B-26", "logprobs", {"prompt": "a", "logprobs": True}, "integer"),
    ("J-03", "prompt", {"prompt": ["a"] * 10_000}, "1024"),
    ("J-03", "n", {"prompt": ["a"] * 100, "n": 100}, "1024"),
    ("B-19", "suffix", {"prompt": "a", "suffix": "b"}, "not supported"),
    ("B-19", "messages", {"prompt": "a", "messages": USER}, "unknown"),
    ("B-17", "prompt", {"prompt": "\ud800"}, "surrogate"),
]


@pytest.mark.parametrize(("case", "param", "body", "hint"), COMPLETION_ONLY)
def test_a_completion_that_cannot_be_is_refused_by_name(
    case: str, param: str, body: dict[str, Any], hint: str
) -> None:
    error = refused_both_ways(COMPLETIONS, body)
    assert (error["param"], hint in error["message"]) == (param, True), (case, error)


CHAT_ONLY: list[tuple[str, str, dict[str, Any], str]] = [
    ("B-07", "messages", {}, "required"),
    ("B-07", "messages", {"messages": []}, "at least 1"),
    ("B-07", "messages", {"messages": "hi"}, "list"),
    ("B-07", "messages[0]", {"messages": ["hi"]}, "object"),
    ("F-19", "messages[0].role", {"messages": [{"role": "boss", "content": "a"}]}, "user"),
    ("F-19", "messages[0].content", {"messages": [{"role": "user"}]}, "required"),
    ("F-19", "messages[0].content", {"messages": [{"role": "user", "content": None}]}, "required"),
    ("F-19", "messages[0].content", {"messages": [{"role": "user", "content": 5}]}, "text"),
    (
        "F-19",
        "messages[0].content[1].type",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "text",
    ),
    ("B-19", "messages[1].prefix", {"messages": [*USER, {**USER[0], "prefix": True}]}, "not supported"),
    ("B-19", "messages[0].images", {"messages": [{**USER[0], "images": ["AA"]}]}, "not supported"),
    ("B-19", "reasoning_effort", {"messages": USER, "reasoning_effort": "high"}, "none"),
    ("B-19", "think", {"messages": USER, "think": True}, "only false"),
    ("J-03", "top_logprobs", {"messages": USER, "logprobs": True, "top_logprobs": 10**6}, "20"),
    ("J-03", "top_logprobs", {"messages": USER, "top_logprobs": 2}, "logprobs"),
    ("J-03", "logprobs", {"messages": USER, "logprobs": 2}, "boolean"),
    (
        "B-19",
        "max_completion_tokens",
        {"messages": USER, "max_tokens": 5, "max_completion_tokens": 50},
        "differ",
    ),
    ("B-19", "modalities", {"messages": USER, "modalities": ["text", "audio"]}, "not supported"),
    ("B-19", "prompt", {"messages": USER, "prompt": "a"}, "unknown field"),
    (
        "B-08",
        "chat_template_kwargs",
        {"messages": USER, "chat_template_kwargs": {"x": [float("nan")]}},
        "finite",
    ),
    ("B-17", "messages", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
]


@pytest.mark.parametrize(("case", "param", "body", "hint"), CHAT_ONLY)
def test_a_chat_that_cannot_be_is_refused_by_name(
    case: str, param: str, body: dict[str, Any], hint: str
) -> None:
    error = refused_both_ways(CHAT, body)
    assert error["param"].startswith(param), (case, error)
    assert hint in error["message"], (case, error)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "logit_bias"])
def test_b_08_a_number_that_is_not_finite_is_refused_by_name(field: str, number: str) -> None:
    value = f'{{"1": {number}}}' if field == "logit_bias" else number
    error = refused(COMPLETIONS, content=f'{{"prompt": "hi", "{field}": {value}}}'.encode())
    assert error["param"].startswith(field)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_b_08_no_field_takes_a_number_that_is_not_finite(path: str) -> None:
    """Whatever it is for, and within a list or an object, too."""
    kind = CompletionBody if path == COMPLETIONS else ChatBody
    start = {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}

    async def run() -> None:
        async with in_process(build_service()) as client:
            for name in {*kind.model_fields, *kind.neutral}:
                for value in (float("nan"), float("-inf"), [float("inf")], {"a": float("nan")}):
                    if name == "nvext" and isinstance(value, dict):
                        continue  # it has a field that is not known, which is ignored
                    answer = await client.post(path, content=json_bytes({**start, name: value}))
                    assert answer.status_code == 400, (name, value)
                    assert answer.json()["error"]["param"].startswith(name), (name, value)

    asyncio.run(run())


NO_OBJECTS = {
    "garbage": b'{: "model": 1}',
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "text": b'"text"',
    "number": b"5",
    "deep lists": b"[" * 10_000,
    "deep objects": b'{"prompt":' * 10_000,
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "cut": b'{"prompt": "hi"',
    "trailing": b'{"prompt": "hi"} trailing',
    "5000 digits": b'{"prompt": "hi", "n": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", NO_OBJECTS.values(), ids=NO_OBJECTS.keys())
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_b_17_a_body_that_is_no_json_object_is_refused(path: str, content: bytes) -> None:
    assert len(refused(path, content=content)["message"]) < 200


def test_b_17_the_content_type_does_not_matter() -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    response = ask(COMPLETIONS, content=b'{"prompt": "hi"}', headers=headers)
    assert response.status_code == 200


def test_b_26_stream_options_without_stream_are_refused() -> None:
    error = refused(COMPLETIONS, {"prompt": "hi", "stream_options": {"include_usage": True}})
    assert error["param"] == "stream_options"
    error = refused(COMPLETIONS, {"prompt": "hi", "stream": True, "stream_options": {"colour": 1}})
    assert error["param"] == "stream_options.colour"


def test_b_26_messages_hold_neither_the_prompt_nor_names_of_classes_nor_paths() -> None:
    secret = "the launch code is 0000"
    bodies = [
        {"prompt": secret, "logprobs": 25},
        {"prompt": secret, "temperature": -1},
        {"prompt": [secret, 5]},
        {"prompt": {"a": secret}},
        {"prompt": secret * 100},
        {"prompt": secret, "seed": secret, "user": 5},
    ]
    for body in bodies:
        message = refused_both_ways(COMPLETIONS, body)["message"]
        assert not any(word in message for word in ("launch", "class", "legato", "pydantic", "/"))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
@pytest.mark.parametrize("name", ["no-such-model", "", "fake"])
def test_b_15_another_models_name_is_not_found(path: str, name: str) -> None:
    start = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    error = refused(path, {**start, "model": name}, status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_b_15_without_a_name_the_served_model_answers() -> None:
    assert ask(COMPLETIONS, {"prompt": "hi"}).json()["model"] == "fake/model"


class TestContextLength:
    """B-11, B-12, B-14: arithmetic before queueing, with both numbers; nothing is ever truncated."""

    @pytest.mark.parametrize("body", [{}, {"max_tokens": 1}], ids=["no max_tokens", "one token"])
    @pytest.mark.parametrize("num_prompt", [MAX_LEN, MAX_LEN + 1, 5 * MAX_LEN])
    def test_a_prompt_without_room_for_one_token_is_refused(
        self, body: dict[str, Any], num_prompt: int
    ) -> None:
        error = refused_both_ways(COMPLETIONS, {"prompt": [1] * num_prompt, **body})
        assert error["code"] == "context_length_exceeded"
        assert str(num_prompt) in error["message"]
        assert str(MAX_LEN) in error["message"]

    def test_a_chat_without_room_is_refused_too(self) -> None:
        messages = [{"role": "user", "content": "x" * MAX_LEN}]
        assert refused_both_ways(CHAT, {"messages": messages})["code"] == "context_length_exceeded"

    def test_what_fits_exactly_is_served_in_chunks(self) -> None:
        """The prompt is longer than a step's budget."""
        answer = ask(COMPLETIONS, {"prompt": [1] * (MAX_LEN - 1), "max_tokens": 1}).json()
        assert answer["usage"]["total_tokens"] == MAX_LEN

    def test_one_bad_prompt_of_several_refuses_all(self) -> None:
        refused_both_ways(COMPLETIONS, {"prompt": [[1], [1] * (MAX_LEN + 1)]})


class WithoutBos(FakeTokenizer):
    def encode(self, text: str, **options: bool) -> list[int]:
        return super().encode(text, **{**options, "add_special_tokens": False})


@pytest.mark.parametrize("prompt", ["", [""], ["hi", ""]])
def test_b_07_an_empty_text_without_a_bos_is_refused(prompt: object) -> None:
    service = build_service(tokenizer=WithoutBos())
    answer = ask(COMPLETIONS, {"prompt": prompt}, service=service)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["message"]) == (
        "prompt",
        "the prompt is empty",
    )


def test_b_07_an_empty_text_is_served_from_bos_where_the_model_has_one() -> None:
    answer = ask(COMPLETIONS, {"prompt": ["", "hi"], "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == 1 + 3


def test_the_same_server_goes_on_after_every_kind_of_refusal() -> None:
    """Survivors: hundreds of bad requests in between change nothing for a good one."""

    async def run() -> list[str]:
        texts = []
        async with in_process(build_service()) as client:
            for _, param, value, _ in BOTH:
                field = param.split(".")[0].split("[")[0]
                assert (await client.post(COMPLETIONS, json={"prompt": "a", field: value})).status_code == 400
            for _, _, body, _ in COMPLETION_ONLY:
                assert (await client.post(COMPLETIONS, content=json_bytes(body))).status_code == 400
            answer = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 4})
            texts.append(answer.json()["choices"][0]["text"])
        return texts

    assert asyncio.run(run()) == ["abcd"]
