"""An adapter: OpenVINO GenAI's continuous batching behind POST /v1/completions, so that it can be measured.

OpenVINO GenAI has no HTTP server of its own. This one takes token ids, decodes greedily to `max_tokens`
and streams token ids: what `benchmarks.peers` sends, and nothing more. One thread adds requests, steps the
pipeline and hands tokens to the event loop; it sleeps when there is nothing to do. It does not know text.

Runs in OpenVINO's own environment, not in Legato's: see benchmarks/README.md.
"""

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import openvino
import openvino_genai
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field


class Body(BaseModel):
    """The part of OpenAI's request that the adapter obeys; it refuses what it would answer wrongly."""

    prompt: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    stream: Literal[True]
    ignore_eos: Literal[True]
    temperature: Literal[0]


@dataclass(slots=True, kw_only=True, eq=False)
class Reply:
    """One request on its way through the pipeline. `tokens` ends with None; `gone` is set by the client."""

    body: Body
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    gone: threading.Event = field(default_factory=threading.Event)
    handle: Any = None

    def put(self, tokens: list[int] | None) -> None:
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, tokens)


class Driver:
    """The thread that owns the pipeline."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._arrived: queue.Queue[Reply | None] = queue.Queue()
        self._running: list[Reply] = []
        self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)
        self._thread.start()

    def submit(self, reply: Reply) -> None:
        self._arrived.put(reply)

    def close(self) -> None:
        self._arrived.put(None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        next_id = 0
        while True:
            try:
                reply = self._arrived.get(block=not self._running)
            except queue.Empty:
                self._step()
                continue
            if reply is None:
                return
            next_id += 1
            self._add(reply, next_id)

    def _add(self, reply: Reply, request_id: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = reply.body.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([reply.body.prompt], dtype=np.int64))
        reply.handle = self._pipeline.add_request(request_id, ids, config)
        self._running.append(reply)

    def _step(self) -> None:
        for reply in self._running:
            if reply.gone.is_set():
                reply.handle.cancel()
        self._pipeline.step()
        still = []
        for reply in self._running:
            while reply.handle.can_read():
                for output in reply.handle.read().values():
                    reply.put(list(output.generated_ids))
            if reply.handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
                still.append(reply)
            else:
                reply.put(None)
        self._running = still


def event(data: object) -> bytes:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


async def events(reply: Reply) -> AsyncIterator[bytes]:
    """One event for each read of the pipeline, then the usage."""
    count = 0
    try:
        while (tokens := await reply.tokens.get()) is not None:
            count += len(tokens)
            yield event({"choices": [{"index": 0, "text": "", "token_ids": tokens, "finish_reason": None}]})
        usage = {"prompt_tokens": len(reply.body.prompt), "completion_tokens": count}
        yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"
    finally:
        reply.gone.set()


def application(pipeline: Any) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.driver = Driver(pipeline)
        yield
        app.state.driver.close()

    app = FastAPI(lifespan=lifespan)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": f"{openvino_genai.__version__} (adapter)"}

    @app.post("/v1/completions")
    async def completions(request: Request, body: Body) -> StreamingResponse:
        reply = Reply(body=body, loop=asyncio.get_running_loop())
        request.app.state.driver.submit(reply)
        return StreamingResponse(events(reply), media_type="text/event-stream")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder that optimum-cli export openvino wrote")
    parser.add_argument("--port", type=int, default=8402)
    parser.add_argument("--cache-gb", type=int, default=2, help="size of the KV cache")
    parser.add_argument("--max-batch-tokens", type=int, default=256, help="OpenVINO's default is 256")
    arguments = parser.parse_args()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = arguments.cache_gb
    scheduler.max_num_batched_tokens = arguments.max_batch_tokens
    pipeline = openvino_genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU")
    uvicorn.run(application(pipeline), host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
