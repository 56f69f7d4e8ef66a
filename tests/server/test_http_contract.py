"""HTTP around the API: encodings, versions, paths, and what routes tell of the server."""

import asyncio
import gzip
import json
import socket
import time
from typing import Any

import httpx
import pytest
from server_rig import (
    BOS,
    EOS,
    MAX_LEN,
    MODEL,
    TEMPLATE,
    ScriptedRunner,
    StartServer,
    ask,
    build_service,
    slow,
)

from legato.server.transport.body_limits import BodyLimitMiddleware
from legato.server.transport.errors import nearest_path

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "hi", "max_tokens": 3}


# -- encodings of bodies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "coding", ["gzip", "GZIP", "deflate", "br", "zstd", "gzip, identity", "identity, br"]
)
def test_j_06_a_compressed_body_is_415(path: str, coding: str) -> None:
    content = gzip.compress(json.dumps(BODY).encode())
    answer = ask(path, content=content, headers={"Content-Encoding": coding})
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"
    assert "Content-Encoding" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("coding", ["identity", "Identity", "", "identity, identity"])
def test_a_body_as_it_is_may_say_so(coding: str) -> None:
    assert ask(COMPLETIONS, BODY, headers={"Content-Encoding": coding}).status_code == 200


def test_j_06_a_bomb_is_refused_unread(start_server: StartServer) -> None:
    """Its size does not matter, and the client can read the answer."""
    server = start_server()
    bomb = gzip.compress(bytes(50_000_000))
    answer = httpx.post(f"{server.url}{COMPLETIONS}", content=bomb, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert httpx.get(f"{server.url}/health").status_code == 200


# -- HTTP/1.0 ---------------------------------------------------------------------------------------------


def raw(port: int, version: str, body: dict[str, Any], *headers: str) -> tuple[bytes, bytes]:
    """(head, all that comes until the server closes) of one request."""
    content = json.dumps(body).encode()
    lines = [f"POST {COMPLETIONS} HTTP/{version}", f"Content-Length: {len(content)}", *headers, "", ""]
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall("\r\n".join(lines).encode() + content)
        received = b""
        while data := connection.recv(65536):
            received += data
    head, _, rest = received.partition(b"\r\n\r\n")
    return head.lower(), rest


@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",)])
def test_a_stream_in_http_1_0_has_no_chunks_and_ends_with_its_connection(
    start_server: StartServer, headers: tuple[str, ...]
) -> None:
    server = start_server()
    head, rest = raw(server.port, "1.0", {**BODY, "stream": True}, *headers)
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    blocks = rest.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    texts = [json.loads(block[6:])["choices"][0]["text"] for block in blocks[:-2]]
    assert "".join(texts) == "abc"
    server.wait_idle()


def test_a_whole_answer_in_http_1_0_has_its_length(start_server: StartServer) -> None:
    server = start_server()
    head, rest = raw(server.port, "1.0", BODY)
    assert f"content-length: {len(rest)}".encode() in head
    assert json.loads(rest)["choices"][0]["text"] == "abc"
    head, rest = raw(server.port, "1.0", {"prompt": []})
    assert head.startswith(b"http/1.1 400")
    assert f"content-length: {len(rest)}".encode() in head


def test_a_stream_in_http_1_1_has_chunks_as_before(start_server: StartServer) -> None:
    head, rest = raw(start_server().port, "1.1", {**BODY, "stream": True}, "Host: a", "Connection: close")
    assert b"transfer-encoding: chunked" in head
    assert rest.endswith(b"0\r\n\r\n")


# -- paths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/models/", "/v1/models"),
        ("//v1/models", "/v1/models"),
        ("/v1//models", "/v1/models"),
        ("/models", "/v1/models"),
        ("/v1/v1/models", "/v1/models"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/v1/completions/", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/health/", "/health"),
    ],
)
def test_n_10_an_unknown_path_names_the_one_that_was_meant(path: str, meant: str) -> None:
    answer = ask(f"http://legato{path}", {}, method="GET")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["message"]) == ("not_found", f"no such path; there is {meant}")


@pytest.mark.parametrize("path", ["/", "//", "/v1", "/v1/", "/v1/completion", "/s", "/v1/responses"])
def test_n_10_a_path_like_no_other_names_none(path: str) -> None:
    answer = ask(f"http://legato{path}", {}, method="GET")
    assert answer.json()["error"]["message"] == "no such path"


def test_the_nearest_path_is_never_an_empty_one() -> None:
    assert nearest_path("/a", ["", "/", "/b"]) is None
    assert nearest_path("/b/", ["", "/a/b", "/b"]) == "/b"


# -- what routes tell of the server -----------------------------------------------------------------------


def test_the_model_card_has_no_path_of_the_server() -> None:
    for path in ("/v1/models", f"/v1/models/{MODEL}"):
        card = ask(path, method="GET").json()
        card = card["data"][0] if "data" in card else card
        assert card["root"] == card["id"] == MODEL


def test_the_tokenizers_configuration_is_told_as_by_hugging_face() -> None:
    assert ask("/tokenizer_info", method="GET").json() == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": 258,
        "model_max_length": MAX_LEN,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(BOS): {"content": "<bos>", "special": True},
            str(EOS): {"content": "<eos>", "special": True},
        },
        "chat_template": TEMPLATE,
    }
    service = build_service(chat_template=None)
    assert ask("/tokenizer_info", method="GET", service=service).json()["chat_template"] is None


def test_g_13_a_server_that_reads_long_prompts_is_healthy_though_no_token_comes(
    start_server: StartServer,
) -> None:
    """Only a step that hangs is trouble: here each takes a third of the limit, and a prompt takes 8."""
    runner = ScriptedRunner(before=slow(0.1))
    server = start_server(runner, engine_options={"step_timeout": 0.3})
    with (
        httpx.Client(base_url=server.url, timeout=30) as client,
        httpx.stream(
            "POST",
            f"{server.url}{COMPLETIONS}",
            json={"prompt": [[i, *[1] * 490] for i in range(3)], "max_tokens": 1, "stream": True},
            timeout=30,
        ),
    ):
        # The stream's head comes with its first token: until then nothing but prompts was computed.
        assert len(runner.plans) >= 8
        for _ in range(10):
            answer = client.get("/health")
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
            time.sleep(0.05)


def test_j_06_not_one_byte_of_a_compressed_body_is_received() -> None:
    called = []

    async def app(*_: object) -> None:
        called.append(1)

    guard = BodyLimitMiddleware(app, 100)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("not one byte is received")

    scope = {"type": "http", "headers": [(b"content-encoding", b"gzip")], "method": "POST", "path": "/"}
    asyncio.run(guard(scope, receive, send))
    assert sent[0]["status"] == 415
    assert not called
