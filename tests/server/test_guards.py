"""What stands before every route: keys, web pages of other origins, and the limit of a body."""

import asyncio
import json
import logging
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from server_rig import StartServer, ask, build_service, in_process, plain_runner

from legato.core.request import Request
from legato.errors import ConfigError, RequestError
from legato.server.app import create_app
from legato.server.schema.bodies import ChatBody
from legato.server.schema.parsing import as_body
from legato.server.schema.unknown_fields import UnknownFields
from legato.server.service import Limits
from legato.server.transport.api_keys import OPEN_PATHS, ApiKeys

KEY, OTHER = "sk-Legato-1", "sk-Legato-2"
PROMPT = {"prompt": "hi", "max_tokens": 2}


def bearer(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {key}"}


def routes() -> Iterator[tuple[str, str]]:
    """Every path of the application with every method, those that it does not have included."""
    paths = create_app(build_service()).openapi()["paths"]
    for path in (*paths, "/openapi.json"):
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "BREW"):
            yield method, path.replace("{name}", "fake/model")


def variants() -> Iterator[tuple[str, str]]:
    """Ways past a guard that compares paths."""
    yield from routes()
    for path in ("//v1/completions", "/V1/completions", "/v1/completions/", "/v1%2Fcompletions"):
        yield "POST", path
    for path in ("/health/", "/health/../v1/models", "/HEALTH", "//health", "/health%2f..%2fv1%2fmodels"):
        yield "GET", path
    yield from (("GET", "/"), ("GET", "/no/such/path"), ("GET", "/invocations"), ("GET", "/docs"))


def test_j_01_every_route_and_every_other_path_asks_for_a_key() -> None:
    async def run() -> None:
        async with in_process(build_service(keys=ApiKeys([KEY]))) as client:
            for method, path in variants():
                for headers in ({}, bearer("wrong"), bearer(KEY.lower()), bearer(KEY, "Basic"), bearer("")):
                    answer = await client.request(method, path, json=PROMPT, headers=headers)
                    if path in OPEN_PATHS and method in ("GET", "HEAD"):
                        assert answer.status_code == 200, (method, path)
                        continue
                    assert answer.status_code == 401, (method, path)
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert answer.headers["x-request-id"]
                    if method == "HEAD":
                        continue
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    asyncio.run(run())


@pytest.mark.parametrize("key", [KEY, OTHER])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_of_several_keys_opens_every_route(key: str, scheme: str) -> None:
    service = build_service(keys=ApiKeys([KEY, OTHER]))
    headers = bearer(key, scheme)
    assert ask("/v1/completions", PROMPT, service=service, headers=headers).status_code == 200
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json"):
        service = build_service(keys=ApiKeys([KEY, OTHER]))
        assert ask(path, method="GET", service=service, headers=headers).status_code == 200


def test_two_authorizations_are_none() -> None:
    """A proxy in front and the server behind must not each believe another one."""

    async def run() -> int:
        async with in_process(build_service(keys=ApiKeys([KEY]))) as client:
            sent = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer x")]
            return (await client.get("/v1/models", headers=sent)).status_code

    assert asyncio.run(run()) == 401


def test_keys_show_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys([KEY])
    assert KEY not in repr(vars(keys)) + repr(build_service(keys=keys))
    caplog.set_level(logging.DEBUG)
    service = build_service(keys=keys, access_log=True)
    texts = [ask("/v1/models", method="GET", service=service, headers=bearer(KEY + "x")).text]
    for path in ("/version", "/metrics", "/v1/models"):
        service = build_service(keys=keys, access_log=True)
        texts.append(ask(path, method="GET", service=service, headers=bearer(KEY)).text)
    assert KEY not in "".join(texts) + caplog.text


@pytest.mark.parametrize("key", ["", "two words", "line\nend", "schl\N{LATIN SMALL LETTER U}\xfc"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        ApiKeys([key])
    assert not key or key not in caught.value.message


def test_b_18_the_openai_client_reads_the_refusal(start_server: StartServer) -> None:
    server = start_server(keys=ApiKeys([KEY]))
    for key, opens in (("wrong", False), (KEY, True)):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            if opens:
                assert client.models.list().data[0].id == "fake/model"
            else:
                with pytest.raises(openai.AuthenticationError, match="the API key is wrong") as caught:
                    client.models.list()
                assert caught.value.code == "invalid_api_key"


PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


def test_web_pages_of_other_origins_are_let_in_only_if_asked_for() -> None:
    for origins, allowed in (((), None), (("https://a.example",), "https://a.example"), (("*",), "*")):
        service = build_service(allowed_origins=origins)
        answer = ask("/v1/models", method="GET", service=service, headers={"Origin": "https://a.example"})
        assert answer.headers.get("access-control-allow-origin") == allowed
    service = build_service(allowed_origins=("https://a.example",))
    answer = ask("/v1/models", method="GET", service=service, headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("origins", "status"), [((), 401), (("https://a.example",), 200)])
def test_a_preflight_needs_no_key_where_its_page_is_let_in(origins: tuple[str, ...], status: int) -> None:
    service = build_service(keys=ApiKeys([KEY]), allowed_origins=origins)
    headers = {**PREFLIGHT, "Access-Control-Request-Headers": "authorization, x-stainless-os"}
    answer = ask("/v1/chat/completions", method="OPTIONS", service=service, headers=headers)
    assert answer.status_code == status
    service = build_service(keys=ApiKeys([KEY]), allowed_origins=origins)
    plain = ask("/v1/models", method="OPTIONS", service=service, headers={"Origin": "https://a.example"})
    assert plain.status_code == 401, "no preflight"


SMALL = Limits(body_bytes=10_000)


def test_j_05_a_body_that_says_it_is_too_large_is_refused_unread(start_server: StartServer) -> None:
    server = start_server(limits=SMALL)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(5)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n{")
        answer = ""
        while not answer.endswith("}}"):
            answer += client.recv(65536).decode()
    assert answer.startswith("HTTP/1.1 413 ")
    assert '"code":"request_too_large"' in answer
    assert "more than 10000 bytes" in answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_j_05_a_chunked_body_without_an_end_is_refused_as_soon_as_it_is_too_large(
    start_server: StartServer, path: str
) -> None:
    server = start_server(limits=SMALL)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(5)
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(11):
            client.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_j_05_large_bodies_hold_up_nobody_and_no_memory(start_server: StartServer) -> None:
    """Six bodies of 30 MB at once: long texts, a million messages, millions of short prompts, nothing but
    depth. As many messages as are read take a second or two, beside the others."""
    server = start_server(limits=Limits(body_bytes=2**25, all_body_bytes=2**28))
    message = b'{"role": "user", "content": ""}, '
    bodies = [
        *[("/v1/completions", b'{"prompt": "' + b"x" * 30_000_000 + b'"}')] * 3,
        ("/v1/completions", b"[" * 30_000_000),
        ("/v1/completions", b'{"prompt": [' + b"[1], " * 6_000_000 + b"[1]]}"),
        *(
            ("/v1/chat/completions", b'{"messages": [' + message * num + message[:-2] + b"]}")
            for num in (900_000, 40_000)
        ),
    ]
    statuses: list[int] = []

    def send(path: str, body: bytes) -> None:
        statuses.append(httpx.post(server.url + path, content=body, timeout=60).status_code)

    threads = [threading.Thread(target=send, args=both) for both in bodies]
    for thread in threads:
        thread.start()
    worst = 0.0
    with httpx.Client(base_url=server.url) as client:
        while any(thread.is_alive() for thread in threads):
            began = time.monotonic()
            assert client.get("/health", timeout=10).status_code == 200
            worst = max(worst, time.monotonic() - began)
    assert statuses == [400] * len(bodies)
    assert worst < 3
    server.wait_idle()


FAULTS = {
    "messages": {"messages": [1] * 500_000},
    "parts": {"messages": [{"role": "user", "content": [1] * 500_000}]},
    "calls": {"messages": [{"role": "assistant", "tool_calls": [1] * 500_000}]},
    "unknown fields": {f"field {i}": 1 for i in range(300_000)},
    "stops": {"messages": [], "stop": [1] * 500_000},
    "ids": {"messages": [], "stop_token_ids": [1] * 500_000},
    "allowed": {"messages": [], "allowed_token_ids": [1] * 500_000},
    "biases": {"messages": [], "logit_bias": {str(i): "x" for i in range(300_000)}},
    "labels": {"messages": [], "metadata": {str(i): 1 for i in range(300_000)}},
    "tools": {"messages": [], "tools": [1] * 500_000},
    "choices": {"messages": [], "guided_choice": [1] * 500_000},
    "numbers of a schema": {"messages": [], "guided_json": {"enum": [float("nan")] * 500_000}},
    "numbers for a template": {"messages": [], "chat_template_kwargs": {"x": [float("inf")] * 500_000}},
}


@pytest.mark.parametrize("body", FAULTS.values(), ids=FAULTS.keys())
def test_j_05_half_a_million_faults_cost_no_more_than_one(body: dict[str, Any]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            as_body(body, ChatBody, UnknownFields())
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


def test_j_05_the_parameters_of_many_prompts_are_made_once() -> None:
    """1,024 prompts with 250,000 allowed ids each stopped the event loop for 91 s and took 8.5 GB."""
    service = build_service(plain_runner())
    made: set[int] = set()

    class Watch:
        def submitted(self, request: Request) -> None:
            made.add(id(request.params.allowed_token_ids))

        def stepped(self, record: object) -> None: ...
        def aborted(self, *what: object) -> None: ...

    service.engine.engine.observe(Watch())
    body = {"prompt": ["hi", "hello"] * 20, "max_tokens": 1, "allowed_token_ids": [*range(258)]}
    answer = ask("/v1/completions", body, service=service)
    assert len(answer.json()["choices"]) == 40
    assert len(made) == 1


@pytest.mark.parametrize(
    "values",
    [
        b"[%s[]]" % (b"[]," * 2**18),
        b"[%s{}]" % (b"{}," * 2**18),
        b"{%s}" % b",".join([b'"%d": 1' % number for number in range(2**18)]),
        b'"%s"' % (b"[{:" * 2**17),
    ],
    ids=["lists", "objects", "fields", "all three in a text"],
)
def test_j_05_a_body_of_very_many_values_is_refused_unparsed(values: bytes) -> None:
    answer = ask("/v1/completions", content=b'{"prompt": "hi", "zebra": ' + values + b"}")
    assert answer.status_code == 400
    assert str(2**18) in answer.json()["error"]["message"]


def test_a_body_of_exactly_the_limit_is_read() -> None:
    body = json.dumps(PROMPT).encode()
    for num_bytes, status in ((len(body), 200), (len(body) - 1, 413)):

        async def pieces() -> AsyncIterator[bytes]:
            yield body[:5]
            yield body[5:]

        async def run(limits: Limits, content: Any) -> int:
            async with in_process(build_service(limits=limits)) as client:
                return (await client.post("/v1/completions", content=content)).status_code

        limits = Limits(body_bytes=num_bytes)
        assert asyncio.run(run(limits, body)) == status
        assert asyncio.run(run(limits, pieces())) == status


@pytest.mark.parametrize(
    ("limits", "body", "param"),
    [
        (Limits(n=2), {"n": 3}, "n"),
        (Limits(prompts=2), {"prompt": ["a", "b", "c"]}, "prompt"),
        (Limits(choices=5), {"prompt": ["a", "b"], "n": 3}, "n"),
        (Limits(logprobs=1), {"logprobs": 2}, "logprobs"),
    ],
)
def test_j_03_each_limit_of_the_settings_is_named_with_its_number(
    limits: Limits, body: dict[str, Any], param: str
) -> None:
    answer = ask("/v1/completions", {**PROMPT, **body}, service=build_service(limits=limits))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "at most" in error["message"]
    limit = {"n": limits.n if limits.n == 2 else 5, "prompt": 2, "logprobs": 1}[param]
    assert str(limit) in error["message"]


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..\\..\\x", "%2e%2e/etc/passwd", "a\x00b"]
)
def test_a_path_for_a_model_name_is_a_name_that_is_not_served(name: str) -> None:
    opened: list[str] = []
    watching = True

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("open", "os.listdir", "os.scandir"):
            opened.append(str(arguments[0]))

    sys.addaudithook(audit)
    for path, body in (("/v1/completions", PROMPT), ("/tokenize", {"prompt": "a"})):
        answer = ask(path, {**body, "model": name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert name not in answer.text
    watching = False
    assert not [path for path in opened if "etc" in path or "passwd" in path]
