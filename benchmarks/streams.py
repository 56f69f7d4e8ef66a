"""One streamed completion over HTTP, with the time at which each token was read.

Speaks OpenAI's completions API with token ids for a prompt, so that every server reads the same tokens.
Does not know what is measured.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT = httpx.Timeout(600.0, connect=10.0)
"""Seconds without a byte after which a server is given up."""


class BenchmarkError(Exception):
    """A server answered something that cannot be measured. The message names the server and the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where a server listens, and what the report says about it."""

    name: str
    url: str
    """Without a path: http://127.0.0.1:8000."""
    model: str | None = None
    """Sent as `model`; left out if None."""
    note: str = ""
    """Settings and weights, for the reader of the report."""


@dataclass(slots=True, kw_only=True)
class Reply:
    """One reply as it comes in. Times are those of `time.perf_counter`, in seconds."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    """For each token, when the event that carried it was read."""
    completion_tokens: int = 0
    """As the server counts them; 0 until the reply is complete."""

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]

    @property
    def weight(self) -> float:
        """Tokens for each entry of `times`: above 1 if the server held back text without saying so.

        Servers that do not send token ids send no event for a token that ends within a character.
        """
        return self.completion_tokens / len(self.times)


async def read_reply(
    client: httpx.AsyncClient, server: Server, prompt: Sequence[int], max_tokens: int, reply: Reply
) -> Reply:
    """Send one prompt and fill `reply` until its end. Greedy, and no token ends it but the last.

    Raises BenchmarkError unless the stream is whole and the server counts `len(prompt)` and `max_tokens`
    tokens.
    """
    body: dict[str, object] = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if server.model is not None:
        body["model"] = server.model
    content = json.dumps(body)
    headers = {"content-type": "application/json"}
    url = f"{server.url}/v1/completions"
    reply.sent = time.perf_counter()
    async with client.stream("POST", url, content=content, headers=headers) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise BenchmarkError(f"{server.name}: HTTP {response.status_code}: {text:.300}")
        usage = await _read_events(server, response, reply)
    counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if counted != (len(prompt), max_tokens):
        raise BenchmarkError(
            f"{server.name}: counts {counted} tokens of prompt and reply, not {(len(prompt), max_tokens)}"
        )
    reply.completion_tokens = max_tokens
    return reply


async def _read_events(server: Server, response: httpx.Response, reply: Reply) -> dict[str, int]:
    """The usage that the server tells. Raises BenchmarkError unless the stream is whole: it has tokens, the
    finish reason "length", and [DONE] as its last event."""
    usage: dict[str, int] = {}
    reason, is_done = None, False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if is_done:
            raise BenchmarkError(f"{server.name}: a stream goes on after [DONE]: {data:.300}")
        if data == "[DONE]":
            is_done = True
            continue
        now = time.perf_counter()
        event = _event(server, data)
        for choice in event["choices"]:
            ids = choice.get("token_ids")
            count = len(ids) if ids is not None else int(choice["text"] != "")
            reply.times.extend([now] * count)
            reason = choice.get("finish_reason") or reason
        usage = event.get("usage") or usage
    tokens = f"after {len(reply.times)} tokens"
    if not is_done:
        raise BenchmarkError(f"{server.name}: a stream ends without [DONE] {tokens}")
    if reason != "length":
        raise BenchmarkError(f"{server.name}: a stream's finish reason is {reason!r}, not 'length', {tokens}")
    if not reply.times:
        raise BenchmarkError(f"{server.name}: a reply without tokens")
    return usage


def _event(server: Server, data: str) -> dict[str, Any]:
    """One event of a completion, with its choices. Raises BenchmarkError if it is something else."""
    try:
        event = json.loads(data)
    except ValueError:
        raise BenchmarkError(f"{server.name}: an event is not JSON: {data:.300}") from None
    if not isinstance(event, dict) or "error" in event or not isinstance(event.get("choices"), list):
        raise BenchmarkError(f"{server.name}: an event is no part of a completion: {data:.300}")
    return event


async def version_of(client: httpx.AsyncClient, server: Server) -> str:
    """What the server says of itself: GET /version, or llama.cpp's GET /props. Empty if it says nothing."""
    for path, key in (("/version", "version"), ("/props", "build_info")):
        response = await client.get(f"{server.url}{path}")
        if response.status_code == 200 and key in (answer := response.json()):
            return str(answer[key])
    return ""


async def until_tokens(replies: Sequence[Reply], after: float, count: int, limit_s: float) -> None:
    """Wait until every reply got `count` tokens later than `after`, for `limit_s` seconds at most."""
    async with asyncio.timeout(limit_s):
        while any(len(reply.times) < count or reply.times[-count] <= after for reply in replies):
            await asyncio.sleep(0.01)
