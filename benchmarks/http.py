"""What the HTTP side costs: how much later than its step a client reads a token, and processor time a token.

    python -m benchmarks.http --streams 64 --json

A child process serves a `FakeRunner` whose steps take a planned time; this process reads chat streams over
real sockets, as many as run at once. The latency added to a token is from the end of its step, when the
runner's result exists in the engine, to the moment at which the client has its bytes. The streams begin
together, and the first tokens of each are left out. Both processes read one clock (Linux).

The HTTP side is the event loop's thread: text, JSON, sockets. The engine's thread is the scheduler and the
`FakeRunner`, whose own work, done by hand for each position, stands for no model.
"""

import argparse
import asyncio
import gc
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from legato.core.block_pool import BlockPool
from legato.core.events import TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.core.scheduler import Scheduler
from legato.core.state import SchedulerConfig
from legato.core.step_plan import StepPlan
from legato.engine.async_engine import AsyncEngine
from legato.engine.engine import Engine
from legato.engine.fake import FakeRunner
from legato.metrics.journal import StepRecord
from legato.metrics.prometheus import CONTENT_TYPE, Metrics
from legato.server.app import create_app
from legato.server.service import ServedModel, Service, ServiceLifecycle
from legato.server.transport.server import serve
from legato.server.transport.sockets import bind
from legato.text.chat import ChatTemplate
from legato.text.fake import FakeTokenizer
from legato.text.grammar import Grammars

ASCII = 128
"""Tokens below it are whole characters, so each is sent at once."""
BLOCK, NUM_BLOCKS, MAX_LEN = 16, 4096, 1024
WARM = 10
"""First tokens of each stream that are not measured."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Milliseconds and microseconds of one run."""

    streams: int
    step_ms: float
    tokens: int
    """Whose latency was measured."""
    added_p50_ms: float
    added_p99_ms: float
    added_worst_ms: float
    cpu_http_us_per_token: float
    """Processor time of the event loop's thread."""
    cpu_engine_us_per_token: float
    """Of the engine's thread: the scheduler and the FakeRunner."""
    http_share: float
    """Of one core, on average over the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One stream as the client saw it."""

    name: str
    """The answer's id."""
    times: list[float]
    """When the bytes of each token were there."""


class Ends:
    """When each token of each request existed. An observer of the engine."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}

    def submitted(self, request: Request) -> None:
        self.of[request.id] = []

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:
        """Nobody aborts here."""

    def stepped(self, record: StepRecord) -> None:
        for event in record.events:
            if isinstance(event, TokenEvent):
                self.of[event.request_id].append(record.ended)


class Client(asyncio.Protocol):
    """Sends one request and notes when each event of its stream arrives."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._received = b""
        self.times: list[float] = []
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(self._content)}\r\n\r\n"
        )
        self.transport = transport
        transport.write(head.encode() + self._content)

    def data_received(self, data: bytes) -> None:
        self.times += [time.monotonic()] * data.count(b'"content":"')
        self._received += data
        if b"data: [DONE]" in data and not self.done.done():
            self.done.set_result(self._received)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError(self._received.decode(errors="replace")))


async def serve_fake(step_seconds: float, streams: int, report: Path) -> None:
    """Serve until SIGTERM, then write when tokens existed and what the threads used to `report`."""
    config = SchedulerConfig(
        max_batch_tokens=4096,
        max_running=streams,
        max_model_len=MAX_LEN,
        vocab_size=FakeTokenizer().vocab_size,
    )

    def seconds(_: StepPlan) -> float:
        return step_seconds

    runner = FakeRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK, vocab_size=ASCII, step_seconds=seconds)
    pool = BlockPool(NUM_BLOCKS, BLOCK)
    engine = Engine.on_runner(Scheduler(config, pool), runner, clock=time.monotonic)
    metrics = Metrics(model_name="fake", budget=config.max_batch_tokens, blocks=pool)
    ends = Ends()
    engine.observe(metrics)
    engine.observe(ends)
    model = ServedModel(
        name="fake",
        tokenizer=FakeTokenizer(),
        chat_template=ChatTemplate(TEMPLATE, bos_token="", eos_token=""),
        max_model_len=MAX_LEN,
        vocab_size=ASCII,
        grammars=Grammars(FakeTokenizer(), ASCII),
    )
    service = Service(
        engine=AsyncEngine(engine, model.tokenizer),
        model=model,
        metrics_text=lambda: (metrics.render(), CONTENT_TYPE),
        version={},
    )
    gc.collect()
    gc.freeze()  # as the command line does, and for its reason
    began = time.thread_time()
    app, lifecycle = create_app(service), ServiceLifecycle(service)
    await serve(app, lifecycle, bind("127.0.0.1", 0), on_ready=partial(print, flush=True))
    http, everything = time.thread_time() - began, time.process_time()
    report.write_text(json.dumps({"ends": ends.of, "http": http, "other": everything - time.thread_time()}))


async def read_streams(port: int, streams: int, tokens: int) -> list[Reading]:
    """All at once; returns when the last has ended."""
    body = {"messages": [{"role": "user", "content": "x" * 16}], "max_tokens": tokens, "ignore_eos": True}
    content = json.dumps({**body, "stream": True}).encode()
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: Client(content), "127.0.0.1", port))[1] for _ in range(streams)
    ]
    answers = await asyncio.gather(*(client.done for client in clients))
    for client in clients:
        client.transport.close()
    await asyncio.sleep(0)
    readings = []
    for client, answer in zip(clients, answers, strict=True):
        name = answer.partition(b'"id":"')[2].partition(b'"')[0].decode()
        # The chunk with the role has empty content.
        readings.append(Reading(name=name, times=client.times[1:]))
        if len(client.times) != tokens + 1:
            raise SystemExit(f"{len(client.times) - 1} chunks for {tokens} tokens")
    return readings


def added(readings: Sequence[Reading], ends: dict[str, list[float]]) -> list[float]:
    """Seconds from the end of a token's step to its arrival, sorted."""
    return sorted(
        arrived - ended
        for reading in readings
        for arrived, ended in list(zip(reading.times, ends[f"{reading.name}-0"], strict=True))[WARM:]
    )


def measure(streams: int, step_ms: float, tokens: int) -> Result:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "benchmarks.http", "--streams", str(streams)]
        command += ["--step-ms", str(step_ms), "--serve", str(report)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                port = int(server.stdout.readline().rpartition(":")[2])
                began = time.monotonic()
                readings = asyncio.run(read_streams(port, streams, tokens))
                elapsed = time.monotonic() - began
                server.terminate()
                server.wait(30)
            finally:
                server.kill()
        told: dict[str, Any] = json.loads(report.read_text())
    latencies = added(readings, told["ends"])
    num_tokens = streams * tokens
    return Result(
        streams=streams,
        step_ms=step_ms,
        tokens=len(latencies),
        added_p50_ms=round(1e3 * _percentile(latencies, 0.5), 3),
        added_p99_ms=round(1e3 * _percentile(latencies, 0.99), 3),
        added_worst_ms=round(1e3 * latencies[-1], 3),
        cpu_http_us_per_token=round(1e6 * told["http"] / num_tokens, 1),
        cpu_engine_us_per_token=round(1e6 * told["other"] / num_tokens, 1),
        http_share=round(told["http"] / elapsed, 4),
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20.0, help="planned time of a step")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve_fake(arguments.step_ms / 1e3, arguments.streams, arguments.serve))
        return
    result = asdict(measure(arguments.streams, arguments.step_ms, arguments.tokens))
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
