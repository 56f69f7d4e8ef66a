"""The least of an OpenAI server around a library that has none, so that `benchmarks.peers` can measure it.

POST /v1/completions takes token ids, decodes greedily to `max_tokens` and streams token ids; POST /tokenize
tells the ids of a text, as vLLM does. Both take what the client sends and refuse the rest. This file knows no
library.
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


class Text(BaseModel):
    """The part of vLLM's POST /tokenize that an adapter obeys."""

    prompt: str
    add_special_tokens: bool


Tokenize = Callable[[str, bool], list[int]]
"""The ids of a text, with the model's special tokens or without."""

Stream = Callable[[Body], AsyncIterator[list[int]]]
"""The tokens of one reply, step by step. A reader that leaves closes it."""


def application(
    version: str,
    stream: Stream,
    tokenize: Tokenize,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    app = FastAPI(lifespan=lifespan)

    @app.get("/version")
    async def tell_version() -> dict[str, str]:
        return {"version": f"{version} (adapter)"}

    @app.post("/tokenize")
    async def tell_ids(text: Text) -> dict[str, list[int]]:
        return {"tokens": tokenize(text.prompt, text.add_special_tokens)}

    @app.post("/v1/completions")
    async def completions(body: Body) -> StreamingResponse:
        return StreamingResponse(_events(stream, body), media_type="text/event-stream")

    return app


async def _events(stream: Stream, body: Body) -> AsyncIterator[bytes]:
    """One event for each step, then the finish reason and the usage. A reply that fails ends without them."""
    count = 0
    async for tokens in stream(body):
        count += len(tokens)
        yield _event({"choices": [{"index": 0, "text": "", "token_ids": tokens, "finish_reason": None}]})
    reason = "length" if count == body.max_tokens else "stop"
    yield _event({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": reason}]})
    yield _event({"choices": [], "usage": {"prompt_tokens": len(body.prompt), "completion_tokens": count}})
    yield b"data: [DONE]\n\n"


def _event(data: Mapping[str, object]) -> bytes:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
