"""`legato serve`: load a model, or something that takes its time, listen, say that it is ready."""

import gc
import ipaddress
import logging
import math
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from rich.console import Console

from legato import __version__
from legato.cli.interrupts import importing
from legato.cli.load import stages
from legato.cli.logs import configure
from legato.cli.options import cache_dir
from legato.config import EngineSettings, ServerSettings, Settings, in_seconds
from legato.engine.async_engine import AsyncEngine
from legato.engine.engine import Engine
from legato.errors import ConfigError
from legato.metrics.http_series import HttpSeries
from legato.metrics.journal import JournalFile
from legato.metrics.process_series import ProcessSeries
from legato.metrics.prometheus import CONTENT_TYPE, Metrics
from legato.metrics.target_log import TargetLog
from legato.metrics.throughput import ThroughputLog
from legato.metrics.timeline import Targets
from legato.models.source import find_files
from legato.server.app import create_app
from legato.server.schema.unknown_fields import UnknownFields
from legato.server.service import AccessRules, Limits, ServedModel, Service, ServiceLifecycle
from legato.server.transport.api_keys import ApiKeys
from legato.server.transport.event_loop import Turns, run
from legato.server.transport.loading import loading_server
from legato.server.transport.server import serve
from legato.server.transport.shutdown import exit_process
from legato.server.transport.sockets import BACKLOG, bind, url_of
from legato.server.transport.unix_socket import bind_unix, remove_unix
from legato.server.transport.work_pool import WorkPool
from legato.text.chat import ChatTemplate
from legato.text.grammar import Grammars
from legato.text.sampling_defaults import SamplingDefaults
from legato.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SWITCH_INTERVAL = 1e-4
"""Seconds after which a Python thread that wants the interpreter lock gets it. A step takes the lock about a
hundred times, between its compiled kernels. With Python's default of 5 ms, an event loop that is busy with a
burst of requests could hold up a step by half a second."""


class Served(Protocol):
    """What is served: a model with its engine, or what stands in for one."""

    @property
    def engine(self) -> Engine: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def sampling_defaults(self) -> SamplingDefaults: ...
    @property
    def name(self) -> str: ...
    @property
    def source(self) -> Path: ...
    @property
    def settings(self) -> EngineSettings: ...
    @property
    def choices(self) -> Mapping[str, str]: ...


def serve_model(settings: Settings, *, simulate: str | None = None, noise: bool = True) -> None:
    """Runs until a signal ends it, and the process with it. The last line of the start-up goes to standard
    output.

    `simulate` names the costs of steps: no model is loaded then.
    """
    server = settings.server
    # All three before the model: what cannot be used should not cost its loading time.
    keys = _api_keys(server)
    configure(server)
    with _listening(server) as listener:
        if not keys and not _is_private(listener):
            _warn_in_red(
                f"{url_of(listener)} can be reached from other machines, and no API key guards it: "
                "set --api-key-file or LEGATO_API_KEY, or --host 127.0.0.1",
                server,
            )
        _serve_on(listener, settings, keys, simulate, noise)
    exit_process()


def _serve_on(
    listener: socket.socket, settings: Settings, keys: ApiKeys, simulate: str | None, noise: bool
) -> None:
    server = settings.server
    journal = None if server.journal is None else JournalFile(Path(server.journal))
    with (
        loading_server(listener),
        stages() if server.log_format == "text" else nullcontext(logger.info) as progress,
    ):
        served = _load(settings, progress) if simulate is None else _stand_in(settings, simulate, noise)
        for name, choice in served.choices.items():
            _tell(f"{name}: {choice}", server)
        service = _service(served, settings, keys, loopback_only=_needs_guard(listener, keys))
        if service.model.tool_use is not None:
            _tell(f"tool calls: {service.model.tool_use}", server)
        if service.model.chat_template is not None:
            for change in service.model.chat_template.changes:
                _tell(f"chat template: {change}", server)
    note = "" if simulate is None else " (simulated: there is no model)"
    # What the start has made stays for good: the collector need not look through it in the middle of a step.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL)
    with ExitStack() as stack:
        if journal is not None:
            served.engine.observe(stack.enter_context(closing(journal)))
        run(
            serve(
                create_app(service),
                ServiceLifecycle(service),
                listener,
                on_ready=lambda line: print(line + note, flush=True),
                shutdown_timeout=server.shutdown_timeout,
                keep_alive=server.timeout_keep_alive,
                send_timeout=server.send_timeout,
                receive_timeout=server.receive_timeout,
            ),
            service.turns,
        )


@contextmanager
def _listening(server: ServerSettings) -> Iterator[socket.socket]:
    """The socket that the settings ask for. A Unix socket's file is removed at the end."""
    if server.uds is None:
        with bind(server.host, server.port) as listener:
            yield listener
        return
    path = Path(server.uds).absolute()
    listener = bind_unix(path, mode=int(server.uds_mode, 8), backlog=BACKLOG)
    inode = path.stat().st_ino
    try:
        yield listener
    finally:
        remove_unix(listener, path, inode)


def _is_private(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def _needs_guard(listener: socket.socket, keys: ApiKeys) -> bool:
    """Whether web pages that the user opens could use the server: see `loopback_guard`. They cannot connect
    to a Unix socket."""
    return not keys and listener.family != socket.AF_UNIX and _is_private(listener)


def _warn_in_red(line: str, server: ServerSettings) -> None:
    """A warning that nobody overlooks on a terminal."""
    if server.log_format == "json":
        logger.warning(line)
    else:
        Console(stderr=True).print(
            f"warning: {line}", style="bold red", markup=False, highlight=False, soft_wrap=True
        )


def _load(settings: Settings, progress: Callable[[str], None]) -> Served:
    files = find_files(settings.model.model, cache_dir=cache_dir(), progress=progress)
    with importing():  # torch takes seconds, and what stands in for a model needs none
        from legato.engine.build import build

    return build(settings.model, settings.engine, cache_dir=cache_dir(), files=files, progress=progress)


def _stand_in(settings: Settings, costs: str, noise: bool) -> Served:
    from legato.sim.find_costs import find_costs
    from legato.sim.stand_in import build_stand_in

    return build_stand_in(settings.model, settings.engine, find_costs(costs), Path(costs), noise=noise)


def _tell(line: str, server: ServerSettings) -> None:
    """A line of the start-up on standard error, which holds nothing but JSON if the log is JSON."""
    if server.log_format == "json":
        logger.info(line)
    else:
        print(line, file=sys.stderr)


def _api_keys(server: ServerSettings) -> ApiKeys:
    """Those of the settings and those of the file. Raises `ConfigError` if the file has none."""
    keys = [key.get_secret_value() for key in server.api_key]
    if server.api_key_file is not None:
        file = Path(server.api_key_file)
        try:
            listed = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise ConfigError(f"API keys {file}: cannot be read ({reason})", param="api_key_file") from None
        found = [line.strip() for line in listed if line.strip()]
        if not found:
            raise ConfigError(f"API keys {file}: no key in it", param="api_key_file")
        keys += found
    return ApiKeys(keys)


def _service(served: Served, settings: Settings, keys: ApiKeys, *, loopback_only: bool) -> Service:
    server = settings.server
    config = served.engine.scheduler.state.config
    http, turns = HttpSeries(), Turns()
    metrics = _metrics(served, settings, http, turns)
    engine = AsyncEngine(
        served.engine,
        served.tokenizer,
        max_waiting=server.max_waiting,
        max_waiting_tokens=server.max_waiting_tokens,
        max_wait=server.max_wait or math.inf,
        step_timeout=server.step_timeout,
    )
    model = ServedModel(
        name=served.name,
        tokenizer=served.tokenizer,
        chat_template=served.chat_template,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        grammars=Grammars(served.tokenizer, config.vocab_size),
        tool_call_parser=server.tool_call_parser,
        sampling_defaults=served.sampling_defaults,
    )
    return Service(
        engine=engine,
        model=model,
        access=AccessRules(
            keys=keys,
            allowed_origins=server.allowed_origins,
            allowed_hosts=server.allowed_hosts,
            loopback_only=loopback_only,
        ),
        limits=_limits(server),
        sse_keep_alive=server.sse_keep_alive,
        takes_priority=settings.engine.policy == "priority",
        metrics_text=lambda: (metrics.render(), CONTENT_TYPE),
        http=http,
        version={"version": __version__, "python": platform.python_version()}
        | {name: choice for name, choice in served.choices.items() if name == "simulated"},
        work=WorkPool(server.max_waiting),
        turns=turns,
        access_log=server.access_log,
        log_prompts=server.log_prompts,
        unknown_fields=UnknownFields(ignore=server.unknown_fields == "ignore"),
    )


def _metrics(served: Served, settings: Settings, http: HttpSeries, turns: Turns) -> Metrics:
    """The metrics of the engine, of HTTP and of the process. Registers all observers of the engine."""
    metrics = Metrics(
        model_name=served.name,
        budget=served.engine.scheduler.state.config.max_batch_tokens,
        blocks=served.engine.scheduler.state.pool,
        targets=Targets(ttft=in_seconds(settings.engine.ttft_target_ms), tpot=served.settings.tpot_target),
    )
    build = {"version": __version__, "python": platform.python_version()}
    metrics.registry.register(http)
    metrics.registry.register(ProcessSeries(build, lambda: (turns.longest, turns.busy)))
    for observer in (metrics, ThroughputLog(), TargetLog()):
        served.engine.observe(observer)
    return metrics


def _limits(server: ServerSettings) -> Limits:
    return Limits(
        n=server.max_n,
        prompts=server.max_prompts,
        choices=server.max_prompts,
        logprobs=server.max_logprobs,
        body_bytes=server.max_body_size,
        all_body_bytes=server.max_body_memory,
    )
