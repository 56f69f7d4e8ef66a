"""Clients that come in crowds or with giants: what a server must refuse, or do bit by bit."""

import asyncio
import json

from visitors import CHAT, COMPLETIONS, Kind, Visitor, WrongAnswerError, kind_of
from wire import ask, exchange, line, request

MANY_CONNECTIONS, MANY_REQUESTS = 400, 2_000
"""The first are more than the server of a soak has descriptors for."""


async def holds_connections(v: Visitor) -> None:
    """Hundreds at once that ask nothing; those that are closed to make room are opened no more."""

    async def idle() -> None:
        try:
            async with asyncio.timeout(v.most_s / 2), line(v.port) as (reader, _):
                await reader.read()
        except (OSError, TimeoutError):
            return

    await asyncio.gather(*(idle() for _ in range(MANY_CONNECTIONS)))


async def leaves_a_backlog(v: Visitor) -> None:
    """Many replies that it never reads, and then it is gone."""
    body = {"prompt": "hi", "n": 24, "max_tokens": 100, "ignore_eos": True, "stream": True, "logprobs": 5}
    async with line(v.port, hesitant=True, reset=True) as (_, writer):
        writer.write(request(COMPLETIONS, json.dumps(body).encode()))
        await asyncio.sleep(v.rng.uniform(2, v.most_s / 2))


async def giant(v: Visitor) -> int:
    """Fits into a body and never into the model."""
    text = "x " * v.rng.randint(350_000, 500_000)
    body = v.rng.choice(
        ((COMPLETIONS, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]}))
    )
    return (await ask(v.port, *body)).status


async def crowd(v: Visitor) -> int:
    """2,000 small requests, as fast as this process can send them."""
    sent = request(COMPLETIONS, json.dumps({"prompt": "hi", "max_tokens": 1}).encode())
    gate = asyncio.Semaphore(200)  # as many sockets as this process may open

    async def one() -> int:
        async with gate:
            return (await exchange(v.port, sent)).status

    statuses = set(await asyncio.gather(*(one() for _ in range(MANY_REQUESTS))))
    if not statuses <= {200, 429}:
        raise WrongAnswerError(f"a crowd got {sorted(statuses)}")
    return 200


async def surrogates(v: Visitor) -> int:
    """Lone surrogates, as a value and as a name."""
    name, text = json.dumps("\ud800x"), json.dumps("a\udfffb")
    body = v.rng.choice((f'{{"prompt": {text}}}', f'{{"prompt": "hi", {name}: 1}}'))
    answer = await exchange(v.port, request(COMPLETIONS, body.encode()))
    return answer.status


CROWDS: tuple[Kind, ...] = (
    kind_of("holds_connections", holds_connections, None),
    kind_of("leaves_a_backlog", leaves_a_backlog, None),
    kind_of("giant", giant, 400, 429, weight=2),
    kind_of("crowd", crowd, 200),
    kind_of("surrogates", surrogates, 400, 429, weight=2),
)
