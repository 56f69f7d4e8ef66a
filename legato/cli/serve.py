"""`legato serve`: load a model, listen, say that it is ready."""

import asyncio
import gc
import logging
import platform
import sys
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

from legato import __version__
from legato.cli.load import stages
from legato.cli.logs import configure
from legato.cli.options import cache_dir
from legato.config import ServerSettings, Settings, in_seconds
from legato.engine.async_engine import AsyncEngine
from legato.engine.build import Built, build
from legato.errors import ConfigError
from legato.metrics.journal import JournalFile
from legato.metrics.prometheus import CONTENT_TYPE, Metrics
from legato.metrics.target_log import TargetLog
from legato.metrics.throughput import ThroughputLog
from legato.metrics.timeline import Targets
from legato.server.guards import ApiKeys
from legato.server.lobby import lobby
from legato.server.run import bind, serve
from legato.server.service import Limits, Service

logger = logging.getLogger(__name__)


def serve_model(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. The last line of the start-up goes to standard output."""
    server = settings.server
    # All three before the model: what cannot be used should not cost its loading time.
    keys = _api_keys(server)
    configure(server)
    listener = bind(server.host, server.port)
    journal = None if server.journal is None else JournalFile(Path(server.journal))
    with lobby(listener), stages() if server.log_format == "text" else nullcontext(logger.info) as progress:
        built = build(settings.model, settings.engine, cache_dir=cache_dir(), progress=progress)
        for name, choice in built.choices.items():
            _tell(f"{name}: {choice}", server)
    service = _service(built, settings, keys)
    # What the start has made stays for good: the collector need not look through it in the middle of a step.
    gc.collect()
    gc.freeze()
    with ExitStack() as stack:
        if journal is not None:
            built.engine.observe(stack.enter_context(closing(journal)))
        asyncio.run(
            serve(
                service,
                listener,
                on_ready=lambda line: print(line, flush=True),
                shutdown_timeout=server.shutdown_timeout,
                keep_alive=server.timeout_keep_alive,
                send_timeout=server.send_timeout,
            )
        )


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


def _service(built: Built, settings: Settings, keys: ApiKeys) -> Service:
    server = settings.server
    scheduler = built.engine.scheduler
    metrics = Metrics(
        model_name=built.name,
        budget=scheduler.config.max_batch_tokens,
        blocks=scheduler.blocks,
        targets=Targets(
            ttft=in_seconds(settings.engine.ttft_target_ms), tpot=in_seconds(settings.engine.tpot_target_ms)
        ),
    )
    built.engine.observe(metrics)
    built.engine.observe(ThroughputLog())
    built.engine.observe(TargetLog())
    engine = AsyncEngine(
        built.engine,
        built.tokenizer,
        max_waiting=server.max_waiting,
        max_waiting_tokens=server.max_waiting_tokens,
        step_timeout=server.step_timeout,
    )
    return Service(
        engine=engine,
        chat_template=built.chat_template,
        model_name=built.name,
        model_root=str(built.source),
        max_model_len=built.max_model_len,
        keep_alive=settings.server.sse_keep_alive,
        sampling_defaults=built.sampling_defaults,
        takes_priority=settings.engine.policy == "priority",
        vocab_size=built.spec.vocab_size,
        metrics_text=lambda: (metrics.render(), CONTENT_TYPE),
        version={"version": __version__, "python": platform.python_version()},
        limits=Limits(
            n=server.max_n,
            prompts=server.max_prompts,
            choices=server.max_prompts,
            logprobs=server.max_logprobs,
            body_bytes=server.max_body_size,
        ),
        keys=keys,
        allowed_origins=server.allowed_origins,
        access_log=server.access_log,
        log_prompts=server.log_prompts,
    )
