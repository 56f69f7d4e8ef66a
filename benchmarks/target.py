"""Whether the target is kept, and what that costs: gaps and first tokens while a long prompt arrives.

    python -m benchmarks.target --json

`arrival`: 8 replies are under way when a prompt of 2,000 tokens comes. Rows for targets and, in turns with
them, for fixed budgets. `ttft_ratio` is the long prompt's time to first token over the best among the fixed
budgets whose p99 gap is no longer: what a person would have found by trying all of them.

`change`: replies with contexts from 1,000 to 8,000 tokens, prompts of all lengths, and twice as many replies
from the middle on. `error_p50` and `error_p90` are those of the predictions, each made before its step.

The engine runs in this process, without HTTP. A gap is the time between two tokens of one reply.
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from legato.config import EngineSettings, ModelSettings
from legato.core.budget import Budget, FixedBudget, TargetBudget
from legato.core.events import TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.cost.cost_model import quantile
from legato.engine.build import build
from legato.engine.engine import Engine
from legato.metrics.journal import StepRecord
from legato.sampling_params import SamplingParams

STREAMS, LONG = 8, 2_000
FIXED = (64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)
Row = dict[str, float | str | None]


@dataclass
class Load:
    """Requests for an engine, and what was seen of its steps. An observer of it."""

    engine: Engine
    draw: random.Random
    ids: range
    """Token ids that made-up prompts are drawn from."""
    records: list[StepRecord] = field(default_factory=list)
    token_times: dict[RequestId, list[float]] = field(default_factory=dict)
    num: int = 0

    def submitted(self, request: Request) -> None:
        self.token_times[request.id] = [request.arrival]

    def stepped(self, record: StepRecord) -> None:
        self.records.append(record)
        for event in record.events:
            if isinstance(event, TokenEvent):
                self.token_times[event.request_id].append(record.ended)

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:
        """Nothing to be learned from it."""

    def send(self, num_prompt: int, num_reply: int) -> RequestId:
        self.num += 1
        request = Request(
            id=RequestId(f"r{self.num}"),
            prompt=tuple(self.draw.choices(self.ids, k=num_prompt)),
            params=SamplingParams(max_tokens=num_reply, temperature=0.7, seed=self.num),
            arrival=self.engine.clock(),
        )
        self.engine.submit(request)
        return request.id

    def ttft(self, request_id: RequestId) -> float | None:
        arrival, *tokens = self.token_times[request_id]
        return tokens[0] - arrival if tokens else None

    def gaps(self, since: float, until: float) -> Iterator[float]:
        """Those that end in a span of time."""
        for _, *tokens in self.token_times.values():
            for before, token in pairwise(tokens):
                if since < token <= until:
                    yield token - before

    def end(self) -> None:
        """Abort everything and forget it."""
        for request_id in list(self.token_times):
            self.engine.abort(request_id)
        self.token_times.clear()
        self.records.clear()


def middle_ids(vocab_size: int) -> range:
    """Most of a vocabulary. Its ends are left out: special and unused tokens are there."""
    return range(vocab_size // 50, vocab_size - vocab_size // 50)


@dataclass(frozen=True)
class Run:
    """One arrival of the long prompt: its time to first token, and all gaps until then."""

    ttft: float
    gaps: tuple[float, ...]


def arrival(load: Load, budget: Budget) -> Run:
    engine = load.engine
    engine.scheduler.state.budget = budget
    streams = [load.send(100, 2_000) for _ in range(STREAMS)]
    while any(len(load.token_times[stream]) < 10 for stream in streams):
        engine.step()
    began = engine.clock()
    long = load.send(LONG, 8)
    while (ttft := load.ttft(long)) is None:
        engine.step()
    run = Run(ttft, tuple(load.gaps(began, engine.clock())))
    load.end()
    return run


def arrivals(load: Load, budget: TargetBudget, targets: list[float], repeats: int) -> Iterator[Row]:
    """Targets and fixed budgets in turns; a row for each."""
    fixed: dict[int, list[Run]] = {size: [] for size in FIXED}
    aimed: dict[float, list[Run]] = {target: [] for target in targets}
    for _ in range(repeats):
        for target in targets:
            budget.target = target
            aimed[target].append(arrival(load, budget))
        for size in FIXED:
            fixed[size].append(arrival(load, FixedBudget(size)))
    for size, runs in fixed.items():
        yield {"load": "arrival", "fixed": size, **_numbers(runs)}
    for target, runs in aimed.items():
        row = {"load": "arrival", "target_ms": 1000 * target, **_numbers(runs), **_over(_gaps(runs), target)}
        allowed = [size for size in FIXED if _p99(_gaps(fixed[size])) <= _p99(_gaps(runs))]
        if allowed:
            best = min(allowed, key=lambda size: statistics.median(run.ttft for run in fixed[size]))
            ratios = [ours.ttft / theirs.ttft for ours, theirs in zip(runs, fixed[best], strict=True)]
            row |= {"best_fixed": best, "ttft_ratio": statistics.median(ratios)}
        yield row


def change(load: Load, budget: TargetBudget, target: float, seconds: float) -> Row:
    """Long contexts, prompts of all lengths, and a load that doubles in the middle."""
    engine, draw = load.engine, load.draw
    engine.scheduler.state.budget, budget.target = budget, target
    began = engine.clock()
    next_prompt = began
    while (now := engine.clock()) < began + seconds:
        wanted = STREAMS if now < began + seconds / 2 else 2 * STREAMS
        if len(engine.scheduler.state.running) + len(engine.scheduler.state.waiting) < wanted:
            load.send(draw.choice((1_000, 2_000, 4_000, 7_500)), draw.choice((50, 200, 400)))
        if now > next_prompt:
            load.send(draw.choice((50, 200, 500, 2_000)), 20)
            next_prompt = now + draw.expovariate(0.5)
        engine.step()
    gaps = list(load.gaps(began, engine.clock()))
    errors = [
        abs(record.elapsed / record.schedule.predicted - 1)
        for record in load.records
        if record.schedule.predicted
    ]
    row: Row = {"load": "change", "target_ms": 1000 * target, "gap_p99_ms": 1000 * _p99(gaps)}
    row |= {"gap_max_ms": 1000 * max(gaps), **_over(gaps, target), "num_gaps": len(gaps)}
    row |= {"error_p50": quantile(errors, 0.5), "error_p90": quantile(errors, 0.9), "num_steps": len(errors)}
    load.end()
    return row


def _gaps(runs: list[Run]) -> list[float]:
    return [gap for run in runs for gap in run.gaps]


def _p99(gaps: list[float]) -> float:
    return quantile(gaps, 0.99)


def _numbers(runs: list[Run]) -> Row:
    gaps = _gaps(runs)
    ttft = statistics.median(run.ttft for run in runs)
    return {"ttft_ms": 1000 * ttft, "gap_p99_ms": 1000 * _p99(gaps), "gap_max_ms": 1000 * max(gaps)}


def _over(gaps: list[float], target: float) -> Row:
    """Shares of the gaps that exceed the target by a tenth, and by a half."""
    return {
        "over_10": sum(gap > 1.1 * target for gap in gaps) / len(gaps),
        "over_50": sum(gap > 1.5 * target for gap in gaps) / len(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--targets-ms", type=float, nargs="+", default=[120, 200, 400])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--change-seconds", type=float, default=30)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "legato")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = EngineSettings(tpot_target_ms=options.targets_ms[0], kv_memory=3 << 30, prefix_cache=False)
    built = build(ModelSettings(model=options.model), settings, cache_dir=options.cache_dir)
    budget = built.engine.scheduler.state.budget
    assert isinstance(budget, TargetBudget)
    load = Load(built.engine, random.Random(0), middle_ids(built.spec.vocab_size))
    built.engine.observe(load)
    targets = [target / 1000 for target in options.targets_ms]
    rows = list(arrivals(load, budget, targets, options.repeats))
    rows += [change(load, budget, target, options.change_seconds) for target in targets]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(
                "  ".join(
                    f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in row.items()
                )
            )


if __name__ == "__main__":
    main()
