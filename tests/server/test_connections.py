"""Connections as the network brings them: slow, silent, endless or not HTTP at all. And what many at once
must not do to each other."""

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_rig import (
    MODEL,
    Connect,
    RunningServer,
    ScriptedRunner,
    StartServer,
    build_service,
    in_process,
    slow,
    wait_until,
)

from legato.core.step_plan import StepPlan
from legato.server.transport.connection import MAX_HEAD_BYTES
from legato.server.transport.loading import loading_server
from legato.server.transport.sockets import bind

STREAM: dict[str, Any] = {"prompt": "hi", "max_tokens": 500, "ignore_eos": True, "stream": True}


def connected(server: RunningServer, *, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(10)
    client.connect(("127.0.0.1", server.port))
    return client


def post(client: socket.socket, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)


def read_all(client: socket.socket) -> bytes:
    received = b""
    while data := client.recv(1 << 16):
        received += data
    return received


def reset_within(client: socket.socket, seconds: float, data: bytes = b"") -> bool:
    """Whether the server breaks the connection while `data` is sent over and over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            client.sendall(data)
        except (ConnectionResetError, BrokenPipeError):
            return True
        if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return True
        time.sleep(0 if data else 0.01)
    return False


# Much more than the kernel takes for a client that does not read.
LARGE: dict[str, Any] = {**STREAM, "n": 32, "logprobs": 5}


def test_a_client_that_takes_nothing_is_dropped_and_holds_nothing(start_server: StartServer) -> None:
    server = start_server(timeouts={"send_timeout": 0.3})
    with connected(server, receive_buffer=4096) as client:
        post(client, LARGE)
        wait_until(lambda: server.service.engine.engine.scheduler.state.step > 0)
        server.wait_idle(20)  # its replies end and hold no block, though nobody read them
        assert reset_within(client, 5)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_takes_little_is_not_dropped(start_server: StartServer) -> None:
    server = start_server(timeouts={"send_timeout": 0.3})
    with connected(server, receive_buffer=4096) as client:
        post(client, {**LARGE, "n": 8})
        received = b""
        for _ in range(30):
            received += client.recv(2048)
            time.sleep(0.05)
        while b"[DONE]" not in received[-50:]:
            received += client.recv(1 << 16)
    assert received.count(b'"finish_reason":"length"') == 8


def test_a_head_without_an_end_is_refused(start_server: StartServer) -> None:
    server = start_server()
    for start in (b"GET /" + b"x" * 70_000, b"GET / HTTP/1.1\r\nX-Request-ID: " + b"x" * 70_000):
        with connected(server) as client:
            client.sendall(start)
            answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert (
            json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].count(str(MAX_HEAD_BYTES)) == 1
        )
    headers = {f"X-{number}": "x" * 60 for number in range(900)}
    assert httpx.get(f"{server.url}/health", headers=headers).status_code == 200
    content = b"x" * 1_000_000  # a body is no head
    assert httpx.post(f"{server.url}/v1/completions", content=content).status_code == 400


def test_headers_after_a_chunked_body_have_a_limit_too(start_server: StartServer) -> None:
    server = start_server(timeouts={"receive_timeout": 0.5})
    with connected(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
        assert reset_within(client, 5, b"X-Trailer: " + b"x" * 1000 + b"\r\n")


POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    ("start", "drop", "status"),
    [
        (b"GET /health HTTP/1.1\r\nX-Slow: ", b"x", b"408"),
        (POST + b"Content-Length: 1000\r\n\r\n", b"x", b"408"),
        (POST + b"Content-Length: 999999999\r\n\r\n", b"x", b"413"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", b"408"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: ", b"x", b"408"),
    ],
    ids=["head", "body", "refused body", "chunks", "trailer"],
)
def test_a_request_that_comes_drop_by_drop_has_an_end(
    start_server: StartServer, start: bytes, drop: bytes, status: bytes
) -> None:
    server = start_server(timeouts={"receive_timeout": 0.3})
    with connected(server) as client:
        client.sendall(start)
        received, deadline = b"", time.monotonic() + 5
        client.settimeout(0.02)
        with suppress(ConnectionError):
            while time.monotonic() < deadline:
                client.sendall(drop)
                try:
                    if not (data := client.recv(1 << 16)):
                        break
                    received += data
                except TimeoutError:
                    pass
        assert time.monotonic() < deadline, "it went on"
    assert received.startswith(b"HTTP/1.1 " + status)
    wait_until(lambda: server.service.engine.num_streams == 0)


def test_half_a_request_does_not_end_the_stream_before_it(start_server: StartServer) -> None:
    runner = ScriptedRunner(before=slow(0.01))
    server = start_server(runner, timeouts={"receive_timeout": 0.1})
    with connected(server) as client:
        post(client, {**STREAM, "max_tokens": 60})
        answer = client.recv(100)
        client.sendall(b"GET /hea")
        answer += read_all(client)
    assert answer.count(b"data: [DONE]") == 1


def test_garbage_behind_a_request_cuts_its_stream_and_puts_nothing_into_it(start_server: StartServer) -> None:
    server = start_server(ScriptedRunner(before=slow(0.01)))
    with connected(server) as client:
        post(client, STREAM)
        received = client.recv(100)
        client.sendall(b"\x00 garbage\r\n\r\n")
        with suppress(ConnectionResetError):
            received += read_all(client)
    assert b"[DONE]" not in received
    assert received.count(b"HTTP/1.1") == 1
    server.wait_idle()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("offer", ["h2c", "websocket"])
def test_who_offers_another_protocol_is_answered_in_this_one(
    start_server: StartServer, offer: str, chunked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Java's client does with every request, and curl --http2. Twice on one connection, and byte by byte."""
    server = start_server()
    body = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
    head = POST + f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {offer}\r\n".encode()
    if chunked:
        request = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    else:
        request = head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    with connected(server) as client:
        client.sendall(request * 2)
        for byte in request:
            client.sendall(bytes((byte,)))
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    assert answer.count(b'"text":"ab"') == 3
    assert not caplog.records


CLOSING = b"POST /v1/completions HTTP/1.%d\r\nConnection: close\r\n"
HUGE = b"Content-Length: 80000000\r\n\r\n"
EARLY = {
    "a body that is too large": (CLOSING % 1 + HUGE, 413),
    "the same from HTTP 1.0": (CLOSING % 0 + HUGE, 413),
    "a chunk that is none": (CLOSING % 1 + b"Transfer-Encoding: chunked\r\n\r\nx", 400),
    "no HTTP": (b"hello\r\n", 400),
    "a head without an end": (b"GET / HTTP/1.1\r\nX: ", 431),
}


def send_on_and_on(port: int, start: bytes) -> bytes:
    """Megabytes, all before anything is read, as many clients do."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(10)
        client.sendall(start)
        for _ in range(40):
            client.sendall(b" " * 1_000_000)
        return client.recv(1 << 16)


@pytest.mark.parametrize("kind", EARLY)
def test_a_client_that_sends_all_before_it_reads_gets_its_answer(
    start_server: StartServer, kind: str
) -> None:
    """Closing a connection with bytes unread would take the answer away from it."""
    server = start_server()
    start, status = EARLY[kind]
    assert send_on_and_on(server.port, start).startswith(f"HTTP/1.1 {status} ".encode())


def test_so_does_one_that_comes_while_the_server_loads() -> None:
    with bind("127.0.0.1", 0) as listener, loading_server(listener):
        answer = send_on_and_on(listener.getsockname()[1], EARLY["a body that is too large"][0])
    assert answer.startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"\x00" * 100,
        b"GET \xff\xfe HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: +5\r\n\r\nhello",
    ],
    ids=[
        *("TLS", "words", "zeros", "not ASCII", "CONNECT"),
        *("two lengths", "length and chunks", "unknown coding", "signed length"),
    ],
)
def test_what_is_not_http_gets_a_400_in_the_usual_shape(
    start_server: StartServer, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    server = start_server()
    with connected(server) as client:
        client.sendall(garbage)
        answer = read_all(client)
    if answer:
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_j_09_only_the_http_port_listens(start_server: StartServer) -> None:
    server = start_server()
    mine = {entry.readlink().name for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                listening.append(int(fields[1].rpartition(":")[2], 16))
    assert listening == [server.port]


def test_a_20_ten_streams_one_after_another_and_then_a_whole_answer(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server()
    client = connect(server)
    messages: Any = [{"role": "user", "content": "hi"}]
    for _ in range(10):
        with httpx.stream(
            "POST",
            f"{server.url}/v1/chat/completions",
            json={"messages": messages, "max_tokens": 5, "stream": True},
        ) as stream:
            assert "".join(stream.iter_text()).endswith("data: [DONE]\n\n")
    for _ in range(10):
        chunks = list(
            client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5, stream=True)
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abcde"
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5)
    assert whole.choices[0].message.content == "abcde"
    server.wait_idle()


def test_c_17_a_second_stream_does_not_end_the_first(start_server: StartServer, connect: Connect) -> None:
    server = start_server(ScriptedRunner(before=slow(0.002)))
    client = connect(server)

    def read(prompt: str, chunks: list[str]) -> None:
        for chunk in client.completions.create(model=MODEL, prompt=prompt, max_tokens=200, stream=True):
            chunks.append(chunk.choices[0].text)

    alone: list[str] = []
    read("first", alone)
    first: list[str] = []
    second: list[str] = []
    thread = threading.Thread(target=read, args=("first", first))
    thread.start()
    wait_until(lambda: len(first) > 20)
    read("second", second)
    thread.join(10)
    assert "".join(first) == "".join(alone)
    assert len("".join(first)) == len("".join(second)) == 200
    server.wait_idle()


def test_c_14_everyone_whom_a_full_queue_refuses_hears_of_it() -> None:
    """One runs, one waits, ten are told to come later, at once."""
    go_on = threading.Event()

    def before(plan: StepPlan) -> None:  # noqa: ARG001
        assert go_on.wait(10)

    async def run() -> None:
        service = build_service(
            ScriptedRunner(before=before), max_running=1, engine_options={"max_waiting": 1}
        )
        async with in_process(service) as client:
            body = {"prompt": "hi", "max_tokens": 2}
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            while not service.engine.engine.scheduler.state.running:
                await asyncio.sleep(0.001)
            waiting = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(11)]
            done: list[httpx.Response] = []
            for task in asyncio.as_completed(waiting):
                done.append(await asyncio.wait_for(task, 5))
                if len(done) == 10:
                    go_on.set()
            assert [answer.status_code for answer in done] == [429] * 10 + [200]
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in done[:10])
            assert (await running).status_code == 200
            assert service.engine.num_streams == 0

    asyncio.run(run())


def test_j_04_tokens_that_wait_have_a_limit_and_health_answers_meanwhile() -> None:
    go_on = threading.Event()

    def before(plan: StepPlan) -> None:  # noqa: ARG001
        assert go_on.wait(10)

    async def run() -> None:
        options = {"max_waiting_tokens": 2000}
        service = build_service(ScriptedRunner(before=before), max_running=1, engine_options=options)
        async with in_process(service) as client:
            body = {"prompt": [1] * 400, "max_tokens": 1}
            asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(100)]
            while sum(task.done() for task in asked) < 95:
                began = time.monotonic()
                await asyncio.sleep(0)
                assert (await client.get("/health")).status_code == 200
                assert time.monotonic() - began < 1
            go_on.set()
            answers = await asyncio.gather(*asked)
            refused = [answer for answer in answers if answer.status_code == 429]
            assert len(refused) == 95
            assert sorted({answer.status_code for answer in answers}) == [200, 429]
            assert refused[0].json()["error"]["message"] == (
                "2000 prompt tokens wait and the request has 400 more, at most 2000 may"
            )
            assert all(answer.headers["retry-after"] for answer in refused)
            # What was answered, refused or left waits no more.
            answer = await client.post("/v1/completions", json={"prompt": ["x" * 400] * 4, "max_tokens": 1})
            assert answer.status_code == 200

    asyncio.run(run())


def test_j_04_a_prompt_that_waits_alone_may_be_longer_than_the_limit() -> None:
    async def run() -> None:
        async with in_process(build_service(engine_options={"max_waiting_tokens": 10})) as client:
            for _ in range(2):
                body = {"prompt": "x" * 100, "max_tokens": 1}
                assert (await client.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(run())
