"""What is measured: the rate of reading prompts, the rate of decoding, and the stall behind a long prompt.

Each measurement loads one server once and returns named numbers. Prompts are new ones every time: see
prompts.py.
"""

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import httpx

from benchmarks.prompts import Prompts
from benchmarks.streams import BenchmarkError, Reply, Server, read_reply, until_tokens

SHORT_PROMPT, REPLY = 64, 128
STREAMS, SETTLED, LONG_PROMPT, STREAM_LIMIT = 8, 16, 2_000, 1_024
"""The stall: streams that run, tokens of each before the long prompt comes, its length, most tokens each."""

Numbers = dict[str, float]
Measure = Callable[[httpx.AsyncClient, Server, Prompts], Awaitable[Numbers]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number of a measurement as the report shows it."""

    key: str
    title: str
    unit: str
    more_is_better: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """`measure` returns one number for each of `metrics`."""

    name: str
    measure: Measure
    metrics: tuple[Metric, ...]


async def prefill(client: httpx.AsyncClient, server: Server, prompts: Prompts, length: int) -> Numbers:
    """Tokens of the prompt by the time to the first token, over HTTP."""
    reply = await read_reply(client, server, prompts.draw(length), 1, Reply())
    return {f"prefill_{length}": length / (reply.first - reply.sent)}


async def decode(client: httpx.AsyncClient, server: Server, prompts: Prompts, streams: int) -> Numbers:
    """Tokens a second of all streams together while all of them decode.

    From the moment when the last stream has its first token to the moment when the first stream ends.
    """
    replies = [Reply() for _ in range(streams)]
    async with asyncio.TaskGroup() as group:
        for reply in replies:
            prompt = prompts.draw(SHORT_PROMPT)
            group.create_task(read_reply(client, server, prompt, REPLY, reply))
    start = max(reply.first for reply in replies)
    end = min(reply.last for reply in replies)
    if end <= start:
        raise BenchmarkError(f"{server.name}: {streams} streams never decoded all at once")
    tokens = sum(reply.weight * sum(start < at <= end for at in reply.times) for reply in replies)
    return {f"decode_{streams}": tokens / (end - start)}


async def stall(client: httpx.AsyncClient, server: Server, prompts: Prompts) -> Numbers:
    """Gaps between the tokens of running streams while a long prompt is read, and its time to first token.

    A gap counts if any part of it lies between sending the long prompt and its first token.
    """
    replies = [Reply() for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as group:  # a stream that fails ends the measurement
        tasks = [
            group.create_task(read_reply(client, server, prompts.draw(SHORT_PROMPT), STREAM_LIMIT, reply))
            for reply in replies
        ]
        await until_tokens(replies, 0.0, SETTLED, 120.0)
        long = await read_reply(client, server, prompts.draw(LONG_PROMPT), 1, Reply())
        if any(task.done() for task in tasks):
            raise BenchmarkError(f"{server.name}: a stream ended before the long prompt's first token")
        await until_tokens(replies, long.first, 1, 120.0)
        for task in tasks:
            task.cancel()
    before = sorted(_gaps(replies, 0.0, long.sent))
    during = sorted(_gaps(replies, long.sent, long.first))
    return {
        "gap_before": statistics.median(before),
        "gap_worst": during[-1],
        "gap_p99": _percentile(during, 0.99),
        "long_ttft": long.first - long.sent,
    }


def _gaps(replies: Sequence[Reply], start: float, end: float) -> list[float]:
    """Gaps with a part in (start, end), of all replies, in seconds.

    The first tokens of a reply are left out: the prompts of the other streams are being read then.
    """
    return [
        later - earlier
        for reply in replies
        for earlier, later in zip(reply.times[SETTLED // 2 :], reply.times[SETTLED // 2 + 1 :], strict=False)
        if later > start and earlier < end
    ]


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


async def warm_up(client: httpx.AsyncClient, server: Server, prompts: Prompts) -> None:
    """One prompt and one batch of streams, so that compilation and first allocations are over."""
    await read_reply(client, server, prompts.draw(512), 1, Reply())
    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(read_reply(client, server, prompts.draw(SHORT_PROMPT), 8, Reply()))


MEASUREMENTS = (
    Measurement(
        name="prefill_512",
        measure=partial(prefill, length=512),
        metrics=(Metric(key="prefill_512", title="prefill, 512 tokens", unit="tok/s"),),
    ),
    Measurement(
        name="prefill_2048",
        measure=partial(prefill, length=2048),
        metrics=(Metric(key="prefill_2048", title="prefill, 2,048 tokens", unit="tok/s"),),
    ),
    Measurement(
        name="decode_1",
        measure=partial(decode, streams=1),
        metrics=(Metric(key="decode_1", title="decode, 1 stream", unit="tok/s"),),
    ),
    Measurement(
        name="decode_16",
        measure=partial(decode, streams=16),
        metrics=(Metric(key="decode_16", title="decode, 16 streams", unit="tok/s"),),
    ),
    Measurement(
        name="stall",
        measure=stall,
        metrics=(
            Metric(key="gap_before", title="stall: usual gap before", unit="s", more_is_better=False),
            Metric(key="gap_worst", title="stall: worst gap", unit="s", more_is_better=False),
            Metric(key="gap_p99", title="stall: p99 gap", unit="s", more_is_better=False),
            Metric(key="long_ttft", title="stall: long prompt's first token", unit="s", more_is_better=False),
        ),
    ),
)
