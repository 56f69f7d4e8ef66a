"""`legato simulate`: a workload served in simulated time, and what it was like."""

import json
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from legato import __version__
from legato.cli.files import check_writable, write
from legato.cli.load import stages
from legato.cli.simulation_progress import SimulationProgress
from legato.config import Settings
from legato.engine.cost_file import CostFile
from legato.engine.protocol import Observer
from legato.errors import ConfigError
from legato.metrics.journal import JournalFile
from legato.sim.find_costs import DEFAULT, find_costs, in_words
from legato.sim.plot import plot
from legato.sim.report import Report, report, table
from legato.sim.run import Simulation, run_simulation
from legato.workload.arrival import Arrival, scale, select
from legato.workload.rhythm import Rhythm, retime
from legato.workload.scenario import Group, Scenario, check_number, find_scenario
from legato.workload.trace import read_trace

NUM_REQUESTS = 100
"""Of a workload that only has a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadChoice:
    """The flags that say what arrives."""

    trace: Path | None
    scenario: str | None
    rate: float | None
    burstiness: float
    prompt: int | None
    output: int | None
    start: float
    duration: float | None
    limit: int | None
    length_scale: float
    time_scale: float

    def arrivals(self, seed: int) -> tuple[Arrival, ...]:
        """Raises `ConfigError` for flags that do not go together."""
        if (self.trace is not None) + (self.scenario is not None) + (self.prompt is not None) != 1:
            raise ConfigError("give one of --trace, --scenario and --prompt (with --rate)")
        if (self.prompt is None) != (self.output is None):
            raise ConfigError("--prompt and --output go together")
        chosen = select(self._all(seed), start=self.start, duration=self.duration, limit=self.limit)
        if not chosen:
            raise ConfigError("no request is left of the workload: --start, --duration or --limit leave none")
        return scale(chosen, lengths=self.length_scale, time=self.time_scale)

    def _all(self, seed: int) -> tuple[Arrival, ...]:
        rhythm = None if self.rate is None else Rhythm(rate=self.rate, burstiness=self.burstiness)
        if self.trace is not None:
            trace = read_trace(self.trace)
            if not trace.timed and rhythm is None:
                raise ConfigError(f"trace {self.trace} has no times: say with --rate how they come")
            return trace.arrivals if rhythm is None else retime(trace.arrivals, rhythm, seed)
        if self.scenario is not None:
            arrivals = find_scenario(self.scenario).arrivals(seed)
            return arrivals if rhythm is None else retime(arrivals, rhythm, seed)
        if self.prompt is None or self.output is None or rhythm is None:
            raise ConfigError("--prompt and --output need a --rate")
        num = rhythm.rate * self.duration if self.duration is not None else self.limit or NUM_REQUESTS
        check_number(num)
        group = Group(
            prompt=self.prompt,
            output=self.output,
            requests=max(round(num), 1),
            rate=rhythm.rate,
            burstiness=rhythm.burstiness,
        )
        return Scenario(description="a steady load", groups=(group,)).arrivals(seed)


def simulate_workload(
    settings: Settings,
    choice: WorkloadChoice,
    *,
    cost: str | None,
    seed: int,
    noise: bool,
    as_json: Path | None,
    plot_file: Path | None,
    journal: Path | None,
) -> None:
    """Prints a table, and writes the files that were asked for."""
    check_writable(as_json, plot_file, journal)
    arrivals, costs = choice.arrivals(seed), find_costs(cost or DEFAULT)
    print(f"steps cost as those of {in_words(costs)}", file=sys.stderr)
    with ExitStack() as stack:
        every_s = 0.2 if sys.stderr.isatty() else 10.0
        observers: list[Observer] = [
            SimulationProgress(len(arrivals), stack.enter_context(stages()), every_s=every_s)
        ]
        if journal is not None:
            observers.append(stack.enter_context(closing(JournalFile(journal))))
        started = time.perf_counter()
        simulation = run_simulation(
            settings.engine,
            costs,
            arrivals,
            max_model_len=settings.model.max_model_len,
            noise=noise,
            seed=seed,
            observers=observers,
        )
        elapsed = time.perf_counter() - started
    if settings.engine.tpot_target_ms == "auto" and simulation.targets.tpot is not None:
        print(f"target (auto): {1000 * simulation.targets.tpot:g} ms between tokens", file=sys.stderr)
    result = report(simulation)
    text = "\n".join(table(result))
    print(text)
    for line in _refusals(simulation):
        print(line, file=sys.stderr)
    print(f"simulated in {elapsed:.2f} s, {result.num_steps / elapsed:,.0f} steps/s", file=sys.stderr)
    if as_json is not None:
        write(as_json, json.dumps(_document(result, settings, costs, seed), indent=1) + "\n")
    if plot_file is not None:
        write(plot_file, plot(simulation, "Simulation", text))


def _refusals(simulation: Simulation, most: int = 3) -> Sequence[str]:
    """What the first requests were refused for."""
    return [f"request {number}: {reason}" for number, reason in simulation.refused[:most]]


def _document(result: Report, settings: Settings, costs: CostFile, seed: int) -> dict[str, object]:
    return {
        "legato": __version__,
        "python": platform.python_version(),
        "model": costs.model,
        "measured_on": costs.measured_on,
        "engine": settings.engine.model_dump(),
        "seed": seed,
        "result": result.to_json(),
    }
