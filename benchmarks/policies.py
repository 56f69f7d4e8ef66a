"""The orders compared on a recorded trace, in simulated time.

    python -m benchmarks.policies TRACE.csv --budget 512 [--speed 1.0] [--json]

TRACE is a file that `legato simulate` takes. A step takes fixed + per_prefill * chunk tokens + per_decode *
decodes seconds; the defaults are what QoServe published for Llama 3 8B on an A100 (steps of at most 512
tokens). TTFT is from arrival to first token. short and long are the quarter of requests with the shortest and
the longest prompts; urgent is every fourth one, which only the order `priority` knows of.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from legato.core.block_pool import BlockPool
from legato.core.scheduler import Scheduler
from legato.core.scheduling_policy import SCHEDULING_POLICIES
from legato.core.state import SchedulerConfig
from legato.cost.cost_model import quantile
from legato.cost.step_cost import StepCost
from legato.metrics.timeline import NO_TARGETS
from legato.sim.recorder import Recorder
from legato.sim.simulator import simulate
from legato.sim.times import StepTimes
from legato.workload.arrival import Arrival, scale
from legato.workload.trace import read_trace

URGENT_EVERY = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one order made of the trace: TTFT of each request, in the order of the trace, and the steps."""

    ttft: list[float]
    steps: int
    preemptions: int


def serve(
    arrivals: tuple[Arrival, ...], order: str, *, budget: int, num_blocks: int, cost: StepCost
) -> Outcome:
    config = SchedulerConfig(
        max_batch_tokens=budget,
        max_running=min(256, budget),
        max_model_len=1 << 15,
        vocab_size=1 << 20,
        min_chunk=32,
    )
    scheduler = Scheduler(config, BlockPool(num_blocks, 32), policy=SCHEDULING_POLICIES[order](budget))
    recorder = Recorder(NO_TARGETS)
    simulate(scheduler, arrivals, StepTimes(cost), observers=[recorder])
    timelines = sorted(recorder.ended, key=lambda t: int(t.request_id))
    ttft = [timeline.ttft for timeline in timelines if timeline.ttft is not None]
    return Outcome(ttft, len(recorder.steps), recorder.num_preemptions)


def row(order: str, arrivals: tuple[Arrival, ...], outcome: Outcome) -> dict[str, object]:
    by_length = sorted(range(len(arrivals)), key=lambda i: arrivals[i].input_length)
    quarter = len(arrivals) // 4
    short = [outcome.ttft[i] for i in by_length[:quarter]]
    long = [outcome.ttft[i] for i in by_length[-quarter:]]
    return {
        "order": order,
        "mean_ttft_s": round(sum(outcome.ttft) / len(outcome.ttft), 3),
        "p50_ttft_s": round(quantile(outcome.ttft, 0.5), 3),
        "p99_ttft_s": round(quantile(outcome.ttft, 0.99), 3),
        "short_p99_ttft_s": round(quantile(short, 0.99), 3),
        "long_p99_ttft_s": round(quantile(long, 0.99), 3),
        "urgent_p99_ttft_s": round(quantile(outcome.ttft[::URGENT_EVERY], 0.99), 3),
        "max_ttft_s": round(max(outcome.ttft), 3),
        "steps": outcome.steps,
        "preemptions": outcome.preemptions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--num-blocks", type=int, default=8192, help="of 32 tokens")
    parser.add_argument("--speed", type=float, default=1.0, help="2 means twice as many requests a second")
    parser.add_argument("--fixed", type=float, default=14.9e-3)
    parser.add_argument("--per-prefill", type=float, default=81e-6)
    parser.add_argument("--per-decode", type=float, default=95e-6)
    parser.add_argument("--orders", nargs="+", default=list(SCHEDULING_POLICIES), choices=SCHEDULING_POLICIES)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()

    cost = StepCost(
        step=given.fixed, head=0, decode=given.per_decode, prefill=given.per_prefill, context=0, pair=0
    )
    arrivals = tuple(
        replace(arrival, priority=-1 if i % URGENT_EVERY == 0 else 0)
        for i, arrival in enumerate(scale(read_trace(given.trace).arrivals, time=1 / given.speed))
    )
    rows = [
        row(
            order,
            arrivals,
            serve(arrivals, order, budget=given.budget, num_blocks=given.num_blocks, cost=cost),
        )
        for order in given.orders
    ]
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print(*rows[0], sep="\t")
    for each in rows:
        print(*each.values(), sep="\t")


if __name__ == "__main__":
    main()
