"""`legato tune`: measure steps, try settings in simulated time, recommend, and check in real time."""

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from legato import __version__
from legato.cli.files import check_writable, write
from legato.cli.interrupts import importing
from legato.cli.load import stages
from legato.cli.options import cache_dir
from legato.cli.simulate import WorkloadChoice
from legato.config import EngineSettings, Settings, in_seconds
from legato.engine.cost_file import CostFile, write_cost_file
from legato.engine.scheduling import resolve_target
from legato.errors import ConfigError
from legato.metrics.timeline import Targets
from legato.models.source import find_files
from legato.sim.find_costs import find_costs, in_words
from legato.tune.page import page
from legato.tune.setup import serve_command
from legato.tune.trial import Bench
from legato.tune.tuning import Tuning, tune
from legato.tune.verify import Verification, verify
from legato.tune.words import recommendation, verified
from legato.workload.arrival import Arrival, select

if TYPE_CHECKING:
    from legato.engine.build import LoadedModel

DEFAULT_SCENARIO = "documents"
VERIFY_S = 60.0
"""Requests that come within so many seconds are served in real time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Files that were asked for."""

    as_json: Path | None
    plot: Path | None
    costs: Path | None


def tune_model(
    settings: Settings,
    choice: WorkloadChoice,
    outputs: Outputs,
    *,
    cost: str | None,
    seed: int,
    noise: bool,
    max_steps: int,
    verify_too: bool,
) -> None:
    """Prints the recommendation, the command to serve with it, and what `verify_too` measured."""
    check_writable(outputs.as_json, outputs.plot, outputs.costs)
    if settings.engine.tpot_target_ms == 0:
        raise ConfigError("tune needs a --tpot-target-ms: the longest gap between tokens that is wanted")
    arrivals = choice.arrivals(seed)
    costs = None if cost is None else find_costs(cost)
    with stages() as progress:
        built = _build(settings, progress) if costs is None or verify_too else None
        if costs is None:
            assert built is not None
            costs = built.measure_costs()
        if outputs.costs is not None:
            write_cost_file(outputs.costs, costs)
        prices = costs.cost_model()
        print(
            f"steps cost as those of {in_words(costs)}; predicted to within {prices.error(0.5):.1%} (p50), "
            f"{prices.error(0.9):.1%} (p90)",
            file=sys.stderr,
        )
        engine = resolve_target(settings.engine, prices)
        bench = Bench(
            engine=engine,
            costs=costs,
            arrivals=arrivals,
            targets=Targets(tpot=engine.tpot_target, ttft=in_seconds(engine.ttft_target_ms)),
            max_model_len=settings.model.max_model_len,
            noise=noise,
            seed=seed,
        )
        tuning = tune(bench, max_steps=max_steps, progress=progress)
    command = serve_command(settings.model_copy(update={"engine": tuning.engine}))
    lines = [*recommendation(tuning), "", command]
    print("\n".join(lines))
    verification = None
    if verify_too:
        assert built is not None
        verification = _verify(built, tuning, arrivals)
        text = "\n".join(verified(verification, tuning.best.setup))
        print(text)
        lines += ["", text]
    if outputs.as_json is not None:
        content = _document(tuning, settings, costs, seed, command, verification)
        write(outputs.as_json, json.dumps(content, indent=1) + "\n")
    if outputs.plot is not None:
        write(outputs.plot, page(tuning, f"legato tune: {in_words(costs)}", "\n".join(lines)))


def _build(settings: Settings, progress: Callable[[str], None]) -> "LoadedModel":
    files = find_files(settings.model.model, cache_dir=cache_dir(), progress=progress)
    with importing():  # torch takes seconds, and a cost file needs none
        from legato.engine.build import build

    # measured anew anyway, for steps as long as a target would allow them
    changes = {"calibrate": False, "max_batch_tokens": settings.engine.token_limit}
    engine: EngineSettings = settings.engine.model_copy(update=changes)
    return build(settings.model, engine, cache_dir=cache_dir(), files=files, progress=progress)


def _verify(built: "LoadedModel", tuning: Tuning, arrivals: Sequence[Arrival]) -> Verification:
    chosen = select(arrivals, duration=VERIFY_S)
    print(f"serving {len(chosen)} requests in real time, {chosen[-1].time:.0f} s", file=sys.stderr)
    engine = built.new_engine(tuning.engine, tuning.bench.costs)
    return verify(engine, tuning.bench, tuning.best.setup, chosen)


def _document(
    tuning: Tuning,
    settings: Settings,
    costs: CostFile,
    seed: int,
    command: str,
    verification: Verification | None,
) -> dict[str, object]:
    return {
        "legato": __version__,
        "python": platform.python_version(),
        "model": costs.model,
        "measured_on": costs.measured_on,
        "engine": settings.engine.model_dump(),
        "seed": seed,
        "command": command,
        "tuning": tuning.to_json(),
        "verification": None if verification is None else asdict(verification),
    }
