"""Random clients: what they ask, how they behave, and which answers each may get.

Work is for a model; trouble is what a server on the internet meets besides. Every draw is from one seeded
generator. 429 is an answer to any work: twice the capacity arrives. 504 is one only for a request with a
`timeout` of its own. No other 5xx is allowed to anybody.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from wire import PATIENCE_S, Answer, ask, exchange, line, parse, request

Json = dict[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = (
    "the",
    "a",
    "small",
    "big",
    "red",
    "old",
    "quick",
    "town",
    "river",
    "house",
    "bird",
    "stone",
    "walks",
    "sees",
    "under",
    "over",
    "then",
    "and",
    "but",
    "so",
)
SHARED = "You are a careful clerk. Keep the ledger in order and answer in few words. " * 20
MAX_BODY = 2**20
"""The server's --max-body-size."""
DONE = b"data: [DONE]\n\n"
SCHEMA: Json = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["answer", "count"],
    "additionalProperties": False,
}
CANON: Json = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, "logprobs": 5}
"""The request whose reply must be the same bits at any time."""


@dataclass(slots=True)
class Visitor:
    """One client. Acts return the answer's status, None if there is none to judge; they raise
    `WrongAnswerError`."""

    port: int
    rng: random.Random
    canon: object
    """`choices` of the reply to `CANON` by an idle server."""
    most_s: float
    """For how long a client that does nothing stays at most."""

    def text(self, low: int, high: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(low, high)))

    def length(self) -> int:
        return min(1 + int(self.rng.expovariate(1 / 30)), 200)


class WrongAnswerError(Exception):
    """The server did what it must not do."""


Act = Callable[[Visitor], Awaitable[int | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One sort of client."""

    name: str
    act: Act
    allowed: frozenset[int | None]
    weight: int = 1


# Work: the bodies.


def plain(v: Visitor) -> tuple[str, Json]:
    prompts = [v.text(3, 60) for _ in range(v.rng.choice((1, 1, 1, 3)))]
    body: Json = {"prompt": prompts, "max_tokens": v.length(), "n": v.rng.choice((1, 1, 2, 3))}
    if v.rng.random() < 0.3:  # far longer than usual: what such replies need was given to others
        body |= {"prompt": v.text(3, 9), "max_tokens": 600, "ignore_eos": True}
    if v.rng.random() < 0.3:
        body |= {"stop": [v.rng.choice(WORDS), "\n"], "seed": v.rng.randrange(2**32), "temperature": 0.7}
    if v.rng.random() < 0.3:
        body |= {"logprobs": 5, "frequency_penalty": 0.5, "top_k": 40, "logit_bias": {"5": 3}}
    return COMPLETIONS, body


def talk(v: Visitor) -> tuple[str, Json]:
    messages = [{"role": "user", "content": v.text(3, 40)} for _ in range(v.rng.randint(1, 3))]
    return CHAT, {"messages": messages, "max_tokens": v.length(), "n": v.rng.choice((1, 1, 2))}


def tool(v: Visitor) -> tuple[str, Json]:
    function = {"name": f"count_{v.rng.randrange(40)}", "parameters": SCHEMA}
    choice = v.rng.choice(("auto", "required"))
    return CHAT, {
        "messages": [{"role": "user", "content": v.text(3, 20)}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
        "max_tokens": 40,
    }


def schema(v: Visitor) -> tuple[str, Json]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    return COMPLETIONS, {"prompt": v.text(3, 20), "response_format": form, "max_tokens": 60}


def scored(v: Visitor) -> tuple[str, Json]:
    asked = {"echo": True, "logprobs": 3} if v.rng.random() < 0.5 else {"prompt_logprobs": 3}
    return COMPLETIONS, {"prompt": v.text(10, 200), "max_tokens": v.rng.choice((0, 5)), **asked}


def shared(v: Visitor) -> tuple[str, Json]:
    return COMPLETIONS, {"prompt": SHARED + v.text(3, 20), "max_tokens": v.length()}


def long(v: Visitor) -> tuple[str, Json]:
    return COMPLETIONS, {"prompt": v.text(300, 1000), "max_tokens": v.length()}


def targeted(v: Visitor) -> tuple[str, Json]:
    targets = {"tpot_target_ms": v.rng.choice((1, 60, 500)), "ttft_target_ms": v.rng.choice((1, 2000))}
    return COMPLETIONS, {"prompt": v.text(5, 200), "max_tokens": v.length(), **targets}


def hurried(v: Visitor) -> tuple[str, Json]:
    return COMPLETIONS, {"prompt": v.text(5, 400), "max_tokens": 100, "timeout": v.rng.uniform(0.01, 3)}


def work(make: Callable[[Visitor], tuple[str, Json]]) -> Act:
    """Ask, read to the end, and look at the answer."""

    async def act(v: Visitor) -> int:
        path, body = make(v)
        if v.rng.random() < 0.5:
            options = {"include_usage": True, "include_progress": v.rng.random() < 0.3}
            body |= {"stream": True, "stream_options": options}
        answer = await ask(v.port, path, body)
        if answer.status == 200:
            check_complete(answer, body)
        return answer.status

    return act


def check_complete(answer: Answer, body: Json) -> None:
    """Every reply is there, and ends as a reply ends; one with a timeout may end with its error."""
    if body.get("stream"):
        if not answer.body.endswith(DONE) and not ("timeout" in body and b"deadline_exceeded" in answer.body):
            raise WrongAnswerError(f"a stream ends with {answer.body[-300:]!r}")
        return
    choices = json.loads(answer.body)["choices"]
    prompts = body.get("prompt")
    expected = body.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)
    if len(choices) != expected:
        raise WrongAnswerError(f"{len(choices)} replies, asked for {expected}")
    if "response_format" in body and choices[0]["finish_reason"] == "stop":
        json.loads(choices[0]["text"])


async def canon(v: Visitor) -> int:
    """In whatever crowd: the same bits."""
    answer = await ask(v.port, COMPLETIONS, CANON)
    if answer.status == 200 and json.loads(answer.body)["choices"] != v.canon:
        raise WrongAnswerError("the greedy reply differs")
    return answer.status


# Trouble.


async def leaves(v: Visitor) -> None:
    """Before the answer, or somewhere in it, politely or not."""
    path, body = v.rng.choice((plain, talk, long, shared))(v)
    body |= {"max_tokens": 200, "stream": v.rng.random() < 0.7}
    async with line(v.port, reset=v.rng.random() < 0.5) as (reader, writer):
        writer.write(request(path, json.dumps(body).encode()))
        await give_up_after(v.rng.uniform(0, 4), reader.read())


async def reads_by_the_byte(v: Visitor) -> None:
    path, body = talk(v)
    body |= {"stream": True, "logprobs": True, "top_logprobs": 5, "n": 3, "max_tokens": 100}
    async with line(v.port, hesitant=True) as (reader, writer):
        writer.write(request(path, json.dumps(body).encode()))
        for _ in range(v.rng.randint(10, 500)):
            if not await reader.read(1):
                return
            await asyncio.sleep(0.02)


async def reads_nothing(v: Visitor) -> None:
    """In a long soak some stay for longer than the server's --send-timeout."""
    path, body = plain(v)
    body |= {"stream": True, "logprobs": 20, "n": 8, "max_tokens": 100}
    async with line(v.port, hesitant=True, reset=v.rng.random() < 0.5) as (_, writer):
        writer.write(request(path, json.dumps(body).encode()))
        await asyncio.sleep(v.rng.uniform(1, v.most_s))


async def stops_in_the_head(v: Visitor) -> None:
    await say_a_part(v, request(COMPLETIONS, b"{}")[:-6])


async def stops_in_the_body(v: Visitor) -> None:
    await say_a_part(v, request(COMPLETIONS, json.dumps(long(v)[1]).encode()))


async def say_a_part(v: Visitor, sent: bytes) -> None:
    async with line(v.port, reset=v.rng.random() < 0.5) as (reader, writer):
        writer.write(sent[: v.rng.randrange(len(sent))])
        await give_up_after(v.rng.uniform(0, v.most_s / 2), reader.read())


async def give_up_after(seconds: float, reading: Awaitable[bytes]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await reading
    except (TimeoutError, ConnectionResetError):
        return


async def no_json(v: Visitor) -> int:
    body = json.dumps(plain(v)[1]).encode()
    broken = v.rng.choice((body[: v.rng.randrange(len(body))], v.rng.randbytes(50), b"[" * 50_000, b"1e999"))
    return (await exchange(v.port, request(v.rng.choice((COMPLETIONS, CHAT)), broken))).status


WRONG: tuple[Json, ...] = (
    {"max_tokens": -2},
    {"temperature": "hot"},
    {"n": 10**6},
    {"unknown_field": 1},
    {"prompt": []},
    {"prompt": "x " * 30_000},
    {"prompt": [10**12]},
    {"priority": 3},
    {"stop": ["x"] * 100},
    {"logit_bias": {"-1": 1}},
    {"guided_regex": "("},
    {"guided_json": {"type": "nothing"}},
    {"response_format": {"type": "json_schema"}},
    {"timeout": 0},
    {"tpot_target_ms": -5},
    {"model": "../../etc/passwd"},
)


async def wrong_field(v: Visitor) -> int:
    answer = await ask(v.port, COMPLETIONS, {"prompt": "hi", "max_tokens": 5, **v.rng.choice(WRONG)})
    if answer.status != 429 and set(json.loads(answer.body)) != {"error"}:
        raise WrongAnswerError(f"no error but {answer.body[:200]!r}")
    return answer.status


async def no_http(v: Visitor) -> int:
    sent = v.rng.choice(
        (v.rng.randbytes(200), b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\nX\r\n\r\n")
    )
    async with line(v.port) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        return parse(await reader.read()).status


async def huge_body(v: Visitor) -> int:
    return (await exchange(v.port, request(COMPLETIONS, b" " * (2 * MAX_BODY)))).status


async def huge_unmeasured_body(v: Visitor) -> int:
    head = request(COMPLETIONS, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return (await exchange(v.port, head + (b"10000\r\n" + b" " * 2**16 + b"\r\n") * 40)).status


async def huge_head(v: Visitor) -> int:
    return (await exchange(v.port, b"GET /health HTTP/1.1\r\nX: " + b"x" * 100_000)).status


async def lost(v: Visitor) -> int:
    path, body = v.rng.choice(
        (("/v1/none", None), ("/../../etc/passwd", None), (CHAT, None), ("/health", b"{}"))
    )
    return (await exchange(v.port, request(path, body))).status


async def two_at_once(v: Visitor) -> int:
    """Pipelined: the second is sent before the first is answered."""
    first = request("/health").replace(b"Connection: close\r\n", b"")
    async with asyncio.timeout(PATIENCE_S), line(v.port) as (reader, writer):
        writer.write(first + request("/v1/models"))
        received = await reader.read()
    if received.count(b"HTTP/1.1 200 OK") != 2:
        raise WrongAnswerError(f"two requests on one connection got {received[:500]!r}")
    return 200


def kind_of(name: str, act: Act, *allowed: int | None, weight: int = 1) -> Kind:
    return Kind(name=name, act=act, allowed=frozenset(allowed), weight=weight)


WORK = (
    *(
        kind_of(make.__name__, work(make), 200, 429, weight=weight)
        for make, weight in (
            *((plain, 6), (talk, 4), (tool, 2), (schema, 2), (scored, 2)),
            *((shared, 4), (long, 2), (targeted, 2)),
        )
    ),
    kind_of("hurried", work(hurried), 200, 429, 504, weight=2),
    kind_of("canon", canon, 200, 429, weight=2),
)
TROUBLE = (
    kind_of("leaves", leaves, None, weight=8),
    kind_of("reads_by_the_byte", reads_by_the_byte, None, weight=2),
    kind_of("reads_nothing", reads_nothing, None, weight=2),
    kind_of("stops_in_the_head", stops_in_the_head, None),
    kind_of("stops_in_the_body", stops_in_the_body, None, weight=2),
    kind_of("no_json", no_json, 400),
    kind_of("wrong_field", wrong_field, 400, 404, 429, weight=3),
    kind_of("no_http", no_http, 0, 400),
    kind_of("huge_body", huge_body, 413),
    kind_of("huge_unmeasured_body", huge_unmeasured_body, 413),
    kind_of("huge_head", huge_head, 431),
    kind_of("lost", lost, 404, 405),
    kind_of("two_at_once", two_at_once, 200),
)
