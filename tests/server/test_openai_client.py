"""A real server and the official client with its own defaults, which is what users have."""

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from server_rig import (
    BOS,
    MODEL,
    Connect,
    RunningServer,
    ScriptedRunner,
    StartServer,
    ask,
    events_of,
    failing_at,
    plain_runner,
    predicted,
    slow,
    spelled,
)

from legato.server.transport.api_keys import ApiKeys
from legato.text.fake import FakeTokenizer

USER: Any = [{"role": "user", "content": "hi"}]


def async_client_of(server: RunningServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")


def plain_text(prompt: str, num: int) -> str:
    return FakeTokenizer().decode(predicted([BOS, *prompt.encode()], num))


def test_the_model_list_names_the_model_that_requests_need(
    start_server: StartServer, connect: Connect
) -> None:
    client = connect(start_server())
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == MODEL
    assert client.completions.create(model=model.id, prompt="hi").choices[0].text == "abcdefghijklmnop"


def test_chat_whole_and_streamed_give_the_same_message_and_usage(
    start_server: StartServer, connect: Connect
) -> None:
    client = connect(start_server(ScriptedRunner(spelled("Grüße\u2028an 🦊!"))))
    whole = client.chat.completions.create(model=MODEL, messages=USER)
    assert whole.choices[0].message.content == "Grüße\u2028an 🦊!"
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    *tokens, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in tokens) == "Grüße\u2028an 🦊!"
    assert tokens[0].choices[0].delta.role == "assistant"
    assert tokens[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_completions_whole_and_streamed_with_logprobs_agree(
    start_server: StartServer, connect: Connect
) -> None:
    client = connect(start_server())
    body: Any = {"model": MODEL, "prompt": ["hi", "there"], "n": 2, "max_tokens": 5, "logprobs": 2}
    whole = client.completions.create(**body)
    texts = ["", "", "", ""]
    tokens: list[list[str]] = [[], [], [], []]
    for chunk in client.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
            tokens[choice.index] += choice.logprobs.tokens or []
    assert [choice.text for choice in whole.choices] == texts
    assert [choice.logprobs.tokens for choice in whole.choices if choice.logprobs] == tokens


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_09_answers_and_chunks_are_valid_by_the_clients_own_types(path: str) -> None:
    """The client builds its objects unchecked; here its types are held to what is sent, strictly."""
    chat = "chat" in path
    start: dict[str, Any] = {"messages": USER} if chat else {"prompt": ["hi", "there"]}
    whole, chunk = (ChatCompletion, ChatCompletionChunk) if chat else (Completion, Completion)
    logprobs = {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
    for more in ({}, logprobs, {"n": 3, "stop": "c", "return_token_ids": True}):
        body = {**start, **more, "max_tokens": 4}
        whole.model_validate_json(ask(path, body).content, strict=True)
        options = {"include_usage": True, "continuous_usage_stats": True, "include_progress": True}
        for sent in ({}, {"stream_options": options}):
            for event in events_of(ask(path, {**body, "stream": True, **sent}).text):
                for choice in (
                    () if chat else event["choices"]
                ):  # for these there is one type, that of the whole
                    choice["finish_reason"] = choice["finish_reason"] or "stop"
                chunk.model_validate_json(json.dumps(event), strict=True)


def test_chat_logprobs_can_be_read(start_server: StartServer, connect: Connect) -> None:
    answer = connect(start_server()).chat.completions.create(
        model=MODEL, messages=USER, max_tokens=3, logprobs=True, top_logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(entry.token, entry.bytes, len(entry.top_logprobs)) for entry in logprobs.content] == [
        ("a", [97], 1),
        ("b", [98], 1),
        ("c", [99], 1),
    ]


@pytest.mark.parametrize(
    ("error", "body"),
    [
        (openai.BadRequestError, {"max_tokens": -2}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.NotFoundError, {"model": "no-such-model"}),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_b_18_errors_carry_message_and_field(
    start_server: StartServer,
    connect: Connect,
    error: type[openai.APIStatusError],
    body: dict[str, Any],
    streamed: bool,
) -> None:
    with pytest.raises(error) as caught:
        connect(start_server()).completions.create(
            **{"model": MODEL, "prompt": "hi", "stream": streamed, **body}
        )
    assert caught.value.param == next(iter(body))
    assert caught.value.body["message"] in caught.value.message  # type: ignore[index]
    assert caught.value.request_id.startswith("req-")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("path", "key", "error"),
    [
        ("/models", "key", openai.APIStatusError),
        ("/embeddings", "key", openai.NotFoundError),
        ("/completions", "wrong", openai.AuthenticationError),
    ],
    ids=["405", "404", "401"],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_b_18_errors_before_any_route_look_the_same(
    start_server: StartServer, path: str, key: str, error: type[openai.APIStatusError], streamed: bool
) -> None:
    server = start_server(keys=ApiKeys(["key"]))
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client,
        pytest.raises(error) as caught,
    ):
        client.post(path, cast_to=object, body={"prompt": "hi", "stream": streamed})
    assert set(caught.value.body) == {"message", "type", "param", "code"}  # type: ignore[arg-type]
    assert caught.value.body["message"] in caught.value.message  # type: ignore[index]


def test_a_13_an_error_in_a_running_stream_is_raised(start_server: StartServer, connect: Connect) -> None:
    server = start_server(ScriptedRunner(before=failing_at(3)))
    text = ""
    with pytest.raises(openai.APIError, match="failed"):  # noqa: PT012
        for chunk in connect(server).completions.create(model=MODEL, prompt="hi", stream=True):
            text += chunk.choices[0].text
    assert text == "abc"
    server.wait_idle()


def test_c_10_two_requests_with_one_request_id_get_their_own_replies(start_server: StartServer) -> None:
    server = start_server(plain_runner())
    headers = {"X-Request-ID": "same"}

    async def run() -> list[Any]:
        async with async_client_of(server) as client:
            calls = [
                client.completions.with_raw_response.create(
                    model=MODEL,
                    prompt=prompt,
                    max_tokens=200,
                    extra_body={"ignore_eos": True},
                    extra_headers=headers,
                )
                for prompt in ("first", "second")
            ]
            return await asyncio.gather(*calls)

    answers = asyncio.run(run())
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    texts = [answer.parse().choices[0].text for answer in answers]
    assert texts == [plain_text("first", 200), plain_text("second", 200)]
    assert len({answer.parse().id for answer in answers}) == 2


def test_c_18_every_reader_gets_its_own_tokens_whatever_its_pace(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server(plain_runner())
    client = connect(server)
    prompts = [f"reader {number}" for number in range(8)]

    def read(prompt: str) -> str:
        pace = random.Random(prompt).choice([0, 0, 0.002])
        text = ""
        for chunk in client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        ):
            text += chunk.choices[0].text
            time.sleep(pace)
        return text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, prompts)) == [plain_text(prompt, 60) for prompt in prompts]
    server.wait_idle()


def test_b_11_a_prompt_over_the_steps_budget_and_a_short_one_behind_it_are_served(
    start_server: StartServer,
) -> None:
    server = start_server(ScriptedRunner(before=slow(0.01)))

    async def run() -> list[str]:
        async with async_client_of(server) as client:
            prompts = ["x" * 400, "short"]
            calls = [client.completions.create(model=MODEL, prompt=p, max_tokens=3) for p in prompts]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    assert asyncio.run(run()) == ["abc", "abc"]
