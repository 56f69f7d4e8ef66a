"""The costs of steps for an engine that is being built: from the cache, or measured now."""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

from legato import __version__
from legato.core.state import SchedulerConfig
from legato.engine.calibration import calibrate
from legato.engine.cost_file import CostFile, Sample, read_cost_file, write_cost_file
from legato.engine.protocol import Runner
from legato.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_CACHED_ERROR = 0.3
"""A calibration with a larger p90 error is used but not cached. On an idle machine it is below 0.1."""
MAX_SECONDS = 8.0
"""The approximate limit of a calibration. Most take less time."""


def step_costs(
    runner: Runner,
    config: SchedulerConfig,
    *,
    model: str,
    source: Path,
    choices: Mapping[str, str],
    cache_dir: Path,
    anew: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> CostFile:
    """The costs of steps on this machine. Cached for each model file, machine and set of `choices`.

    With `anew`, they are measured even if they are cached. The KV cache must be unused. A cache file that
    cannot be read or written is logged and only costs time. A disturbed measurement is not cached.
    """
    measured_on = {"machine": _machine(), "legato": __version__, **choices}
    path = cache_dir / "costs" / f"{_key(source, config, measured_on)}.json"
    if path.exists() and not anew:
        try:
            return _cached(path, model, measured_on)
        except ConfigError as error:
            logger.warning("%s; measuring anew", error.message)
    samples = calibrate(runner, config, max_seconds=MAX_SECONDS, progress=progress)
    costs = CostFile(
        model=model,
        measured_on=measured_on,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        samples=tuple(Sample(**shape._asdict(), seconds=seconds) for shape, seconds in samples),
    )
    p90 = costs.cost_model().error(0.9)
    if p90 > MAX_CACHED_ERROR:
        logger.warning(
            "what steps cost was measured while other programs ran: one in ten steps is off by %.0f %% or "
            "more; it is not kept, the next start measures anew",
            100 * p90,
        )
        return costs
    try:
        write_cost_file(path, costs)
    except ConfigError as error:
        logger.warning("%s", error.message)
    return costs


def _cached(path: Path, model: str, measured_on: Mapping[str, str]) -> CostFile:
    """The costs that an earlier start measured. Raises `ConfigError` if the file does not belong here."""
    costs = read_cost_file(path)
    if costs.sha256 is None or (costs.model, costs.measured_on) != (model, measured_on):
        raise ConfigError(f"cost file {path}: was not measured by this version for this model and machine")
    return costs


def _key(source: Path, config: SchedulerConfig, measured_on: Mapping[str, str]) -> str:
    status = source.stat()
    limits = config.max_batch_tokens, config.max_running
    identity = [str(source), status.st_size, status.st_mtime_ns, limits, sorted(measured_on.items())]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]


def _machine() -> str:
    return f"{platform.node()}, {platform.machine()}, {os.cpu_count()} cores"
