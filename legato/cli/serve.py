"""`legato serve`: load a model, listen, say that it is ready."""

import asyncio
import logging
import platform
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from legato import __version__
from legato.cli.load import stages
from legato.cli.options import cache_dir
from legato.config import Settings, in_seconds
from legato.engine.async_engine import AsyncEngine
from legato.engine.build import Built, build
from legato.metrics.journal import JournalFile
from legato.metrics.prometheus import CONTENT_TYPE, Metrics
from legato.metrics.target_log import TargetLog
from legato.metrics.throughput import ThroughputLog
from legato.metrics.timeline import Targets
from legato.server.run import bind, serve
from legato.server.service import Service
from legato.text.grammar import Grammars


def serve_model(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. The last line of the start-up goes to standard output."""
    logging.basicConfig(
        level=settings.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn.error").setLevel("WARNING")  # it tells of every start, under that name
    server = settings.server
    # Both before the model: what cannot be opened should not cost its loading time.
    listener = bind(server.host, server.port)
    journal = None if server.journal is None else JournalFile(Path(server.journal))
    with stages() as progress:
        built = build(settings.model, settings.engine, cache_dir=cache_dir(), progress=progress)
        for name, choice in built.choices.items():
            print(f"{name}: {choice}", file=sys.stderr)
    service = _service(built, settings)
    if service.tool_use is not None:
        print(f"tool calls: {service.tool_use}", file=sys.stderr)
    with ExitStack() as stack:
        if journal is not None:
            built.engine.observe(stack.enter_context(closing(journal)))
        asyncio.run(
            serve(
                service,
                listener,
                on_ready=lambda line: print(line, flush=True),
                access_log=server.access_log,
                shutdown_timeout=server.shutdown_timeout,
            )
        )


def _service(built: Built, settings: Settings) -> Service:
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
    return Service(
        grammars=Grammars(built.tokenizer, built.spec.vocab_size),
        tool_call_parser=settings.server.tool_call_parser,
        engine=AsyncEngine(built.engine, built.tokenizer, max_waiting=settings.server.max_waiting),
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
    )
