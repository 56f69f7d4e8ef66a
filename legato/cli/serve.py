"""`legato serve`: load a model, or something that takes its time, listen, say that it is ready."""

import asyncio
import logging
import platform
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol

from legato import __version__
from legato.cli.load import stages
from legato.cli.options import cache_dir
from legato.config import Settings, in_seconds
from legato.engine.async_engine import AsyncEngine
from legato.engine.engine import Engine
from legato.metrics.journal import JournalFile
from legato.metrics.prometheus import CONTENT_TYPE, Metrics
from legato.metrics.target_log import TargetLog
from legato.metrics.throughput import ThroughputLog
from legato.metrics.timeline import Targets
from legato.server.run import bind, serve
from legato.server.service import Service
from legato.text.chat import ChatTemplate
from legato.text.sampling_defaults import SamplingDefaults
from legato.text.tokenizer import Tokenizer


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
    def choices(self) -> Mapping[str, str]: ...


def serve_model(settings: Settings, *, simulate: str | None = None, noise: bool = True) -> None:
    """Runs until SIGTERM or SIGINT. The last line of the start-up goes to standard output.

    `simulate` names the costs of steps: no model is loaded then.
    """
    logging.basicConfig(
        level=settings.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn.error").setLevel("WARNING")  # it tells of every start, under that name
    server = settings.server
    # Both before the model: what cannot be opened should not cost its loading time.
    listener = bind(server.host, server.port)
    journal = None if server.journal is None else JournalFile(Path(server.journal))
    served = _load(settings) if simulate is None else _stand_in(settings, simulate, noise)
    for name, choice in served.choices.items():
        print(f"{name}: {choice}", file=sys.stderr)
    service = _service(served, settings)
    note = "" if simulate is None else " (simulated: there is no model)"
    with ExitStack() as stack:
        if journal is not None:
            served.engine.observe(stack.enter_context(closing(journal)))
        asyncio.run(
            serve(
                service,
                listener,
                on_ready=lambda line: print(line + note, flush=True),
                access_log=server.access_log,
                shutdown_timeout=server.shutdown_timeout,
            )
        )


def _load(settings: Settings) -> Served:
    from legato.engine.build import build  # torch takes seconds, and what stands in for a model needs none

    with stages() as progress:
        return build(settings.model, settings.engine, cache_dir=cache_dir(), progress=progress)


def _stand_in(settings: Settings, costs: str, noise: bool) -> Served:
    from legato.sim.find_costs import find_costs
    from legato.sim.stand_in import build_stand_in

    return build_stand_in(settings.model, settings.engine, find_costs(costs), Path(costs), noise=noise)


def _service(served: Served, settings: Settings) -> Service:
    config = served.engine.scheduler.config
    metrics = Metrics(
        model_name=served.name,
        budget=config.max_batch_tokens,
        blocks=served.engine.scheduler.blocks,
        targets=Targets(
            ttft=in_seconds(settings.engine.ttft_target_ms), tpot=in_seconds(settings.engine.tpot_target_ms)
        ),
    )
    served.engine.observe(metrics)
    served.engine.observe(ThroughputLog())
    served.engine.observe(TargetLog())
    return Service(
        engine=AsyncEngine(served.engine, served.tokenizer, max_waiting=settings.server.max_waiting),
        chat_template=served.chat_template,
        model_name=served.name,
        model_root=str(served.source),
        max_model_len=config.max_model_len,
        keep_alive=settings.server.sse_keep_alive,
        sampling_defaults=served.sampling_defaults,
        takes_priority=settings.engine.policy == "priority",
        vocab_size=config.vocab_size,
        metrics_text=lambda: (metrics.render(), CONTENT_TYPE),
        version={"version": __version__, "python": platform.python_version()}
        | {name: choice for name, choice in served.choices.items() if name == "simulated"},
    )
