"""The orders compared on a recorded trace: the real scheduler, a clock that a formula moves, no model.

    python -m benchmarks.policies TRACE.csv --budget 512 [--speed 1.0] [--json]

TRACE is a CSV with timestamp (seconds), input_length, output_length. A step takes
fixed + per_prefill * chunk tokens + per_decode * decodes seconds; the defaults are what QoServe published for
Llama 3 8B on an A100 (steps of at most 512 tokens). No two prompts share a prefix. TTFT is from arrival to
first token. short and long are the quarter of requests with the shortest and the longest prompts; urgent is
every fourth one, which only the order `priority` knows of.
"""

import argparse
import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from legato.core.block_pool import BlockPool
from legato.core.order import ORDERS
from legato.core.plan import Sampled, StepResult
from legato.core.request import Request, RequestId, SamplingParams
from legato.core.schedule import Schedule
from legato.core.scheduler import Scheduler, SchedulerConfig

URGENT_EVERY = 4
VOCAB = 1 << 20
TOKEN = Sampled(0)


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    num_prompt: int
    num_reply: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one order made of the trace: TTFT of each request, in the order of the trace, and the steps."""

    ttft: list[float]
    ends: list[float]
    steps: int
    chunks: int
    preemptions: int


def read(path: Path, speed: float) -> list[Arrival]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    start = float(rows[0]["timestamp"])
    return [
        Arrival(
            (float(row["timestamp"]) - start) / speed, int(row["input_length"]), int(row["output_length"])
        )
        for row in rows
    ]


def simulate(
    arrivals: list[Arrival], order: str, *, budget: int, num_blocks: int, seconds: Callable[[Schedule], float]
) -> Outcome:
    config = SchedulerConfig(
        max_batch_tokens=budget,
        max_running=min(256, budget),
        max_model_len=1 << 15,
        vocab_size=VOCAB,
        min_chunk=32,
    )
    scheduler = Scheduler(config, BlockPool(num_blocks, 32), order=ORDERS[order](budget))
    first: dict[RequestId, float] = {}
    last: dict[RequestId, float] = {}
    now, coming, steps, chunks, preemptions = 0.0, 0, 0, 0, 0
    while coming < len(arrivals) or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrivals[coming].at)
        while coming < len(arrivals) and arrivals[coming].at <= now:
            scheduler.add(_request(coming, arrivals[coming]))
            coming += 1
        schedule = scheduler.schedule(now)
        scheduler.commit(schedule)
        now += seconds(schedule)
        num_sampled = sum(run.last for run in schedule.runs)
        for event in scheduler.complete(StepResult((TOKEN,) * num_sampled, 0.0), 0.0):
            first.setdefault(event.request_id, now)
            last[event.request_id] = now
        steps, chunks = steps + 1, chunks + len(schedule.chunks)
        preemptions += len(schedule.preempted)
    ids = [RequestId(str(i)) for i in range(len(arrivals))]
    ttft = [first[i] - arrival.at for i, arrival in zip(ids, arrivals, strict=True)]
    return Outcome(ttft, [last[i] for i in ids], steps, chunks, preemptions)


def _request(number: int, arrival: Arrival) -> Request:
    return Request(
        id=RequestId(str(number)),
        prompt=(number, *range(1, arrival.num_prompt)),
        params=SamplingParams(max_tokens=max(arrival.num_reply, 1), seed=0),
        arrival=arrival.at,
        priority=-1 if number % URGENT_EVERY == 0 else 0,
    )


def row(order: str, arrivals: list[Arrival], outcome: Outcome) -> dict[str, object]:
    by_length = sorted(range(len(arrivals)), key=lambda i: arrivals[i].num_prompt)
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
        "chunks": outcome.chunks,
        "preemptions": outcome.preemptions,
    }


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


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
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=ORDERS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()

    def seconds(schedule: Schedule) -> float:
        decodes, prefill = len(schedule.decodes), schedule.num_prefill_tokens
        return float(given.fixed + given.per_prefill * prefill + given.per_decode * decodes)

    arrivals = read(given.trace, given.speed)
    rows = [
        row(
            order,
            arrivals,
            simulate(arrivals, order, budget=given.budget, num_blocks=given.num_blocks, seconds=seconds),
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
