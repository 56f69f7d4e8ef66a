"""`benchmarks.peers`: prompts fit any vocabulary, and a broken stream is an error, not a sample."""

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from server_rig import BOS, StartServer, plain_runner

from benchmarks import adapter
from benchmarks.measurements import decode, stall
from benchmarks.peers import arguments
from benchmarks.prompts import Prompts, prompts_of
from benchmarks.streams import BenchmarkError, Reply, Server, read_reply

Body = dict[str, Any]
Answer = Callable[[str, Body], tuple[int, bytes]]


@contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    """A small HTTP server on a free port. It sends no length: the end of the connection ends a stream."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, content = answer(self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: the output belongs to pytest."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Server(name="small", url=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetch(work: Callable[[httpx.AsyncClient], Any]) -> Any:
    async def run() -> Any:
        async with httpx.AsyncClient(trust_env=False) as client:
            return await work(client)

    return asyncio.run(run())


def event(data: object) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def chunk(text: str = "", reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
DONE = event(b"[DONE]")
WHOLE = [chunk("a"), chunk("b", "length"), USAGE, DONE]


def read(events: list[bytes], status: int = 200) -> Reply:
    """The reply of a server that sends these events to a prompt of 3 tokens; 2 tokens are asked for."""
    with serving(lambda *_: (status, b"".join(events))) as server:
        reply: Reply = fetch(lambda client: read_reply(client, server, [1, 2, 3], 2, Reply()))
    return reply


@pytest.mark.parametrize(
    "events",
    [
        WHOLE,
        [chunk("a"), chunk("b"), chunk("", "length"), USAGE, DONE],
        [line.replace(b"data: ", b"data:") for line in WHOLE],
        [b": comment\n\n", *WHOLE],
    ],
    ids=["whole", "a chunk for the reason", "no space", "comment"],
)
def test_a_whole_stream_is_a_sample(events: list[bytes]) -> None:
    reply = read(events)
    assert len(reply.times) == 2
    assert reply.completion_tokens == 2


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (WHOLE[:-1], "small: a stream ends without [DONE] after 2 tokens"),
        (WHOLE[:1], "small: a stream ends without [DONE] after 1 tokens"),
        ([], "small: a stream ends without [DONE] after 0 tokens"),
        ([*WHOLE[:3], DONE[:9]], "an event is not JSON: [DO"),
        ([WHOLE[0], chunk("b"), USAGE, DONE], "finish reason is None, not 'length', after 2 tokens"),
        ([WHOLE[0], chunk("b", "stop"), USAGE, DONE], "finish reason is 'stop', not 'length'"),
        ([*WHOLE, chunk("c")], "a stream goes on after [DONE]"),
        ([WHOLE[0], event({"error": {"message": "full"}}), DONE], 'no part of a completion: {"error"'),
        ([WHOLE[0], event([1]), DONE], "no part of a completion: [1]"),
        ([WHOLE[0], event(b'{"choices": ['), DONE], 'an event is not JSON: {"choices": ['),
        ([chunk("", "length"), USAGE, DONE], "a reply without tokens"),
        ([*WHOLE[:2], DONE], "counts (None, None) tokens of prompt and reply, not (3, 2)"),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) else "",
)
def test_a_broken_stream_is_an_error(events: list[bytes], message: str) -> None:
    with pytest.raises(BenchmarkError) as caught:
        read(events)
    assert message in str(caught.value)


def test_a_refusal_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match=r"small: HTTP 503: busy"):
        read([b"busy"], 503)


@pytest.mark.parametrize("measure", [decode, stall], ids=["decode", "stall"])
def test_one_broken_stream_of_many_ends_the_measurement(measure: Callable[..., Any]) -> None:
    """At once, and with its reason."""
    count = iter(range(1000))
    tokens = b"".join(chunk("a") for _ in range(20))
    whole = [tokens, chunk("b", "length"), event({"choices": [], "usage": {}}), DONE]

    def answer(_: str, body: Body) -> tuple[int, bytes]:
        del body
        return 200, b"".join(whole) if next(count) else tokens

    prompts = Prompts(begin=(), ids=(7, 8, 9), random=random.Random(0))
    options = {"streams": 4} if measure is decode else {}
    with serving(answer) as server, pytest.raises(ExceptionGroup) as caught:
        fetch(lambda client: measure(client, server, prompts, **options))
    assert (
        caught.value.subgroup(lambda error: "ends without [DONE] after 20 tokens" in str(error)) is not None
    )


def characters(text: str) -> list[int]:
    """Ids from 1000 on: one for each character."""
    return [1000 + ord(character) for character in text]


def as_vllm(_: str, body: Body) -> tuple[int, bytes]:
    ids = [1] * body["add_special_tokens"] + characters(body["prompt"])
    return 200, json.dumps({"count": len(ids), "max_model_len": 10, "tokens": ids}).encode()


def as_llama(_: str, body: Body) -> tuple[int, bytes]:
    """It gives no ids, and no error, where it misses `content`."""
    begin, end = ([5, 6], [7]) if body.get("add_special") else ([], [])
    ids = [*begin, *characters(body["content"]), *end] if "content" in body else []
    return 200, json.dumps({"tokens": ids}).encode()


@pytest.mark.parametrize(
    ("answer", "begin"), [(as_vllm, (1,)), (as_llama, (5, 6))], ids=["vllm", "llama.cpp"]
)
def test_prompts_are_words_of_the_servers_vocabulary(answer: Answer, begin: tuple[int, ...]) -> None:
    with serving(answer) as server:
        prompts: Prompts = fetch(lambda client: prompts_of(client, server, random.Random(0)))
    letters = set(characters("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz "))
    assert prompts.begin == begin
    assert set(prompts.ids) == letters
    drawn = prompts.draw(500)
    assert len(drawn) == 500
    assert drawn[: len(begin)] == list(begin)
    assert set(drawn[len(begin) :]) <= letters
    assert prompts.draw(500) != drawn


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (
            404,
            b"no such route",
            "small: POST /tokenize: HTTP 404: no such route; prompts are made of the ids",
        ),
        (200, b'{"tokens": []}', "small: POST /tokenize gives no ids for 'word'"),
        (200, b'{"tokens": ["wo", "rd"]}', "small: POST /tokenize: no list of ids"),
        (200, b"[]", "small: POST /tokenize: no list of ids: []"),
        (200, b"<html>", "small: POST /tokenize: no list of ids: <html>"),
    ],
)
def test_a_server_that_tells_no_ids_is_refused_by_name(status: int, content: bytes, message: str) -> None:
    with serving(lambda *_: (status, content)) as server, pytest.raises(BenchmarkError) as caught:
        fetch(lambda client: prompts_of(client, server, random.Random(0)))
    assert str(caught.value).startswith(message)


def test_legato_is_measured(start_server: StartServer) -> None:
    server = Server(name="legato", url=start_server(plain_runner()).url)

    async def measure(client: httpx.AsyncClient) -> tuple[Prompts, dict[str, float]]:
        prompts = await prompts_of(client, server, random.Random(0))
        return prompts, await decode(client, server, prompts, streams=2)

    prompts, numbers = fetch(measure)
    assert prompts.begin == (BOS,)
    assert set(prompts.ids) == set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz ")
    assert numbers["decode_2"] > 0


def test_measurements_are_picked_by_the_names_that_the_readme_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["peers", "--server", "a=http://127.0.0.1:1", "--only", "prefill_512", "stall"]
    monkeypatch.setattr("sys.argv", command)
    assert arguments().only == ["prefill_512", "stall"]


def test_an_adapter_is_measured_and_a_short_reply_of_it_is_an_error() -> None:
    lengths = iter([5, 4])

    async def stream(_: adapter.Body) -> AsyncIterator[list[int]]:
        for token in range(next(lengths)):
            yield [token]

    app = adapter.application("1", stream, lambda text, add: [1] * add + characters(text))
    server = Server(name="adapter", url="http://adapter")

    async def measure() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client:
            prompts = await prompts_of(client, server, random.Random(0))
            assert prompts.begin == (1,)
            reply = await read_reply(client, server, prompts.draw(9), 5, Reply())
            assert len(reply.times) == 5
            with pytest.raises(BenchmarkError, match="finish reason is 'stop', not 'length', after 4 tokens"):
                await read_reply(client, server, prompts.draw(9), 5, Reply())

    asyncio.run(measure())
