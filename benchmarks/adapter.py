"""The least of an OpenAI server around a library that has none, so that `benchmarks.peers` can measure it.

POST /v1/completions takes token ids, decodes greedily to `max_tokens` and streams token ids: what the client
sends, and nothing more; it refuses the rest. It knows no library and no text.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Literal

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field


class Body(BaseModel):
    """The part of OpenAI's request that an adapter obeys."""

    prompt: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    stream: Literal[True]
    ignore_eos: Literal[True]
    temperature: Literal[0]


Stream = Callable[[Body], AsyncIterator[list[int]]]
"""The tokens of one reply, step by step. A reader that leaves closes it."""


def application(
    version: str,
    stream: Stream,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    app = FastAPI(lifespan=lifespan)

    @app.get("/version")
    async def tell_version() -> dict[str, str]:
        return {"version": f"{version} (adapter)"}

    @app.post("/v1/completions")
    async def completions(body: Body) -> StreamingResponse:
        return StreamingResponse(_events(stream, body), media_type="text/event-stream")

    return app


async def _events(stream: Stream, body: Body) -> AsyncIterator[bytes]:
    """One event for each step, then the usage."""
    count = 0
    async for tokens in stream(body):
        count += len(tokens)
        yield _event({"choices": [{"index": 0, "text": "", "token_ids": tokens, "finish_reason": None}]})
    yield _event({"choices": [], "usage": {"prompt_tokens": len(body.prompt), "completion_tokens": count}})
    yield b"data: [DONE]\n\n"


def _event(data: Mapping[str, object]) -> bytes:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
