"""Servers without a model, for any test that needs one: a service over a FakeRunner, in this process or
behind a real socket, and a runner whose tokens a test writes down."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import cache
from typing import Any

import httpx
import openai

from legato.core.block_pool import BlockPool
from legato.core.invariants import check_state
from legato.core.scheduler import Scheduler
from legato.core.state import SchedulerConfig
from legato.core.step_plan import SampleRow, SamplingFailure, StepPlan, StepResult
from legato.engine.async_engine import AsyncEngine
from legato.engine.engine import Engine
from legato.engine.fake import FakeRunner, next_token
from legato.metrics.http_series import HttpSeries
from legato.metrics.prometheus import CONTENT_TYPE, Metrics
from legato.server.app import create_app
from legato.server.service import AccessRules, ServedModel, Service, ServiceLifecycle
from legato.server.transport.event_loop import run
from legato.server.transport.server import serve
from legato.server.transport.shutdown import Shutdown
from legato.server.transport.sockets import bind
from legato.text.chat import ChatTemplate
from legato.text.fake import FakeTokenizer
from legato.text.grammar import Grammars

BOS, EOS, VOCAB = 256, 257, 258
MODEL = "fake/model"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUM_BLOCKS, BLOCK_SIZE, BUDGET, MAX_RUNNING, MAX_LEN = 64, 16, 64, 4, 512


def usage_of(num_prompt: int, num_completion: int, num_cached: int = 0) -> dict[str, object]:
    """The `usage` of an answer."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


Script = Callable[[SampleRow], int]
"""The next token of a row; `row.num_generated` counts those before it."""


def spelled(text: str) -> Script:
    """Every reply is `text` and an end-of-text token."""
    tokens = [*text.encode(), EOS]
    return lambda row: tokens[min(row.num_generated, len(tokens) - 1)]


def letters(row: SampleRow) -> int:
    """a, b, c ... z, a, b ... without an end."""
    return ord("a") + row.num_generated % 26


class ScriptedRunner:
    """A FakeRunner whose sampled tokens come from a script. `before` is called with each step's plan; it may
    raise, sleep or block."""

    def __init__(
        self, script: Script = letters, *, before: Callable[[StepPlan], None] = lambda _: None
    ) -> None:
        self.num_blocks, self.block_size = NUM_BLOCKS, BLOCK_SIZE
        self._runner = plain_runner()
        self._script = script
        self._before = before
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._before(plan)
        result = self._runner.run(plan)
        sampled = tuple(
            sample if isinstance(sample, SamplingFailure) else replace(sample, token=self._script(row))
            for sample, row in zip(result.sampled, plan.sample, strict=True)
        )
        return replace(result, sampled=sampled)


def slow(seconds: float) -> Callable[[StepPlan], None]:
    """Makes every step last."""
    return lambda _: time.sleep(seconds)


def failing_at(num_generated: int) -> Callable[[StepPlan], None]:
    """Fails the step that would draw a reply's token of this number."""

    def before(plan: StepPlan) -> None:
        if any(row.num_generated == num_generated for row in plan.sample):
            raise RuntimeError("/secret/path: the device is on fire")

    return before


def plain_runner() -> FakeRunner:
    return FakeRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab_size=VOCAB)


def predicted(prompt: list[int], num: int) -> list[int]:
    """The first `num` tokens that a plain runner gives after `prompt`, end-of-text ignored."""
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


@cache
def fake_grammars() -> Grammars:
    """The same for all services: the process that tries grammars out takes a while to start."""
    return Grammars(FakeTokenizer(), VOCAB)


def build_service(
    runner: FakeRunner | ScriptedRunner | None = None,
    *,
    engine_options: dict[str, Any] | None = None,
    max_running: int = MAX_RUNNING,
    **changes: object,
) -> Service:
    """`engine_options` are keyword arguments of the AsyncEngine. `changes` are fields of `Service`,
    `ServedModel` or `AccessRules`."""
    runner = runner or ScriptedRunner()
    config = SchedulerConfig(
        max_batch_tokens=BUDGET,
        max_running=max_running,
        max_model_len=MAX_LEN,
        vocab_size=FakeTokenizer().vocab_size,
    )
    scheduler = Scheduler(config, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    metrics = Metrics(model_name=MODEL, budget=BUDGET, blocks=scheduler.state.pool)
    engine = Engine.on_runner(scheduler, runner, clock=time.monotonic)
    http = HttpSeries()
    metrics.registry.register(http)
    engine.observe(metrics)
    model = ServedModel(
        name=MODEL,
        tokenizer=FakeTokenizer(),
        chat_template=ChatTemplate(TEMPLATE, bos_token="<bos>", eos_token="<eos>"),
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        grammars=fake_grammars(),
    )
    model = _changed(model, changes)
    service = Service(
        engine=AsyncEngine(engine, model.tokenizer, **(engine_options or {})),
        model=model,
        access=_changed(AccessRules(), changes),
        metrics_text=lambda: (metrics.render(), CONTENT_TYPE),
        http=http,
        version={"version": "0.0.0"},
    )
    return replace(service, **changes)  # type: ignore[arg-type]


def _changed(part: Any, changes: dict[str, object]) -> Any:
    """`part` with those of the changes that are its fields, which are taken out of `changes`."""
    names = [field.name for field in fields(part) if field.name in changes]
    return replace(part, **{name: changes.pop(name) for name in names})


@asynccontextmanager
async def in_process(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application itself, without a socket."""
    await service.engine.start()
    service.readiness.set_ready()
    transport = httpx.ASGITransport(app=create_app(service))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://legato") as client:
            yield client
    finally:
        await service.engine.stop()


def ask(
    path: str,
    body: object = None,
    *,
    service: Service | None = None,
    content: bytes | None = None,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """One request to a fresh server in this process. `body` may hold what JSON cannot, such as NaN."""

    async def run() -> httpx.Response:
        async with in_process(service or build_service()) as client:
            sent = json_bytes(body) if content is None else content
            return await client.request(method, path, content=sent, headers=headers)

    return asyncio.run(run())


def json_bytes(body: object) -> bytes:
    return json.dumps(body).encode()


async def serve_service(service: Service, listener: socket.socket, **options: Any) -> None:
    """Serve until a shutdown. `options` are those of `transport.server.serve`."""
    await serve(create_app(service), ServiceLifecycle(service), listener, **options)


class RunningServer:
    """A real server on a free port, in a thread of this process."""

    def __init__(
        self,
        service: Service,
        *,
        shutdown_timeout: float = 5.0,
        listener: socket.socket | None = None,
        **timeouts: float,
    ) -> None:
        """`timeouts` are arguments of `serve`."""
        self.service = service
        self.scheduler = service.engine.engine.scheduler
        self.lines: list[str] = []
        self._timeouts = {"shutdown_timeout": shutdown_timeout, **timeouts}
        self._listener = listener or bind("127.0.0.1", 0)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        if self._failure is not None:
            raise self._failure
        self.url = self.lines[0].rpartition(" ")[2]
        self.port = 0 if self.url.startswith("unix:") else int(self.url.rpartition(":")[2])

    def ask_to_stop(self) -> None:
        """What SIGTERM does."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._shutdown.request)

    def stop(self) -> None:
        """At once; raises what the server raised."""
        self.ask_to_stop()
        self.ask_to_stop()
        self.join()

    def join(self, timeout: float = 10) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the server does not end"
        if self._failure is not None:
            raise self._failure

    def wait_idle(self, timeout: float = 2) -> None:
        """The pool idle check: nothing runs, nothing waits, every block is free, no map holds a request."""
        wait_until(
            lambda: self.service.engine.num_streams == 0 and not self.scheduler.state.has_work, timeout
        )
        wait_until(lambda: self.scheduler.state.pool.num_used == 0, timeout)
        check_state(self.scheduler.state)

    def _run(self) -> None:
        try:
            run(self._serve(), self.service.turns)
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._shutdown = Shutdown()
        await serve_service(
            self.service,
            self._listener,
            on_ready=self._on_ready,
            shutdown=self._shutdown,
            **self._timeouts,
        )

    def _on_ready(self, line: str) -> None:
        self.lines.append(line)
        self._ready.set()


def wait_until(condition: Callable[[], bool], timeout: float = 2) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def events_of(text: str) -> list[dict[str, Any]]:
    """The chunks of a complete stream, which must be `data:` lines, blank lines and nothing else."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: {") and "\n" not in block for block in blocks[:-2])
    return [json.loads(block[len("data: ") :]) for block in blocks[:-2]]


StartServer = Callable[..., RunningServer]
Connect = Callable[[RunningServer], openai.OpenAI]
"""The types of the fixtures in conftest."""
