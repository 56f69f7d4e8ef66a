"""An adapter: OpenVINO GenAI's continuous batching behind POST /v1/completions, so that it can be measured.

OpenVINO GenAI has no HTTP server of its own. The pipeline has a process of its own, since its `step` holds
the interpreter lock: in one process the tokens of many steps would leave together.

Run from the project's root, in OpenVINO's own environment: see benchmarks/README.md.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]
import uvicorn
from fastapi import FastAPI

from benchmarks.adapter import Body, application


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    id: int
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What one step gave one request."""

    id: int
    tokens: list[int]
    ended: bool


def run_pipeline(connection: Connection, model: str, cache_gb: int, max_batch_tokens: int) -> None:
    """The pipeline's process: takes `Add` and `Cancel`, sends a list of `News` after each step; None ends it.

    Sends an empty list once it is ready. Sleeps while there is nothing to do.
    """
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = cache_gb
    scheduler.max_num_batched_tokens = max_batch_tokens
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
    connection.send([])
    handles: dict[int, Any] = {}
    while True:
        while not handles or connection.poll():
            match connection.recv():
                case None:
                    return
                case Add(id=id) as request:
                    handles[id] = _add(pipeline, request)
                case Cancel(id=id) if id in handles:
                    handles[id].cancel()
        pipeline.step()
        news = [_news(id, handle) for id, handle in handles.items()]
        for item in news:
            if item.ended:
                del handles[item.id]
        connection.send([item for item in news if item.tokens or item.ended])


def _add(pipeline: Any, request: Add) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request.max_tokens
    config.ignore_eos = True
    config.do_sample = False
    ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
    return pipeline.add_request(request.id, ids, config)


def _news(id: int, handle: Any) -> News:
    ended = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
    tokens: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            tokens += output.generated_ids
    return News(id=id, tokens=tokens, ended=ended)


class Bridge:
    """The event loop's side of the connection: a queue of news for each request that runs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queues: dict[int, asyncio.Queue[News]] = {}
        self._count = 0

    def forward(self) -> None:
        """Called whenever the connection can be read."""
        for news in self._connection.recv():
            if (queue := self._queues.get(news.id)) is not None:
                queue.put_nowait(news)

    async def stream(self, body: Body) -> AsyncIterator[list[int]]:
        """The tokens of one reply, step by step. A reader that leaves cancels the request."""
        self._count += 1
        id = self._count
        queue = self._queues[id] = asyncio.Queue()
        self._connection.send(Add(id=id, prompt=body.prompt, max_tokens=body.max_tokens))
        ended = False
        try:
            while not ended:
                news = await queue.get()
                ended = news.ended
                yield news.tokens
        finally:
            del self._queues[id]
            if not ended:
                self._connection.send(Cancel(id=id))


def main() -> None:
    parser = argparse.ArgumentParser(description="OpenVINO GenAI's continuous batching over HTTP.")
    parser.add_argument("model", help="folder that optimum-cli export openvino wrote")
    parser.add_argument("--port", type=int, default=8402)
    parser.add_argument("--cache-gb", type=int, default=1, help="size of the KV cache")
    parser.add_argument("--max-batch-tokens", type=int, default=256, help="OpenVINO's own default")
    options = parser.parse_args()
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(
        target=run_pipeline,
        args=(theirs, options.model, options.cache_gb, options.max_batch_tokens),
        daemon=True,
    )
    process.start()
    theirs.close()
    try:
        ours.recv()
        bridge = Bridge(ours)

        @asynccontextmanager
        async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
            asyncio.get_running_loop().add_reader(ours.fileno(), bridge.forward)
            yield

        tokenizer = openvino_genai.Tokenizer(options.model)

        def tokenize(text: str, add_special_tokens: bool) -> list[int]:
            encoded = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return [int(id) for id in encoded.input_ids.data[0]]

        app = application(openvino_genai.__version__, bridge.stream, tokenize, lifespan)
        uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")
        ours.send(None)
        process.join(timeout=30)
    except EOFError:
        parser.exit(1, "the pipeline ended: see its message above\n")


if __name__ == "__main__":
    main()
