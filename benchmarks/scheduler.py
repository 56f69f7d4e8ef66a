"""What the scheduler itself costs: microseconds a step, bytes a waiting request. No model, no threads.

    python -m benchmarks.scheduler --json

A step is schedule + commit + plan + complete; each running sequence makes one token in it. The waiting ones
cannot start. Unless told otherwise they wait for blocks, which costs most: places are free, and every step
looks for someone who fits into the blocks that are left. Times are medians. Bytes are what one waiting
request of 1,000 tokens adds to the process, its prompt included (printed without --json).
"""

import argparse
import gc
import json
import math
import statistics
import time
import tracemalloc
from dataclasses import asdict, dataclass

from legato.core.admission import WATERMARK
from legato.core.block_pool import BlockPool
from legato.core.output_lengths import OutputLengthEstimator
from legato.core.plan import plan
from legato.core.request import Request, RequestId
from legato.core.scheduler import Scheduler
from legato.core.state import SchedulerConfig
from legato.core.step_plan import StepResult, TokenLogprobs
from legato.sampling_params import SamplingParams

BLOCK = 32
PROMPT = 1200
STEPS = 300
WAITING_PROMPT = 1000
TOKEN = TokenLogprobs(7)


@dataclass(frozen=True, slots=True)
class Row:
    running: int
    waiting: int
    us_per_step: float
    us_schedule: float


def request(number: int, num_prompt: int, max_tokens: int) -> Request:
    """Its prompt shares nothing with those of other numbers."""
    prompt = (number, *range(1000, 999 + num_prompt))
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request(id=RequestId(str(number)), prompt=prompt, params=params, arrival=0.0)


def filled(running: int, waiting: int, waiting_for: str) -> Scheduler:
    """A scheduler in which `running` sequences decode and `waiting` ones cannot start."""
    num_tokens = PROMPT + 2 * STEPS
    need = running * -(-num_tokens // BLOCK)
    places = running if waiting_for == "places" else running + 8
    config = SchedulerConfig(
        max_batch_tokens=max(8192, 2 * running), max_running=places, max_model_len=4096, vocab_size=1 << 20
    )
    foreseen = OutputLengthEstimator(guess=num_tokens - PROMPT, weight=1e9)
    pool = BlockPool(math.ceil((need + 8) / (1 - WATERMARK)), BLOCK)
    scheduler = Scheduler(config, pool, output_lengths=foreseen)
    for i in range(running):
        scheduler.add(request(i, PROMPT, num_tokens - PROMPT))
    while sum(s.num_remaining == 1 for s in scheduler.state.running.values()) < running:
        step(scheduler)
    for i in range(waiting):
        scheduler.add(request(running + i, WAITING_PROMPT, 100))
    assert len(scheduler.state.running) == running
    return scheduler


def step(scheduler: Scheduler) -> tuple[float, float]:
    """Seconds of a whole step, and of its decision alone."""
    began = time.perf_counter()
    schedule = scheduler.schedule(0.0)
    decided = time.perf_counter()
    scheduler.commit(schedule)
    made = plan(scheduler.state, schedule)
    paused = time.perf_counter()
    result = StepResult((TOKEN,) * len(made.sample), 0.0)
    resumed = time.perf_counter()
    scheduler.complete(result, 0.0)
    return time.perf_counter() - resumed + paused - began, decided - began


def measure(running: int, waiting: int, waiting_for: str) -> Row:
    scheduler = filled(running, waiting, waiting_for)
    times = [step(scheduler) for _ in range(STEPS)]
    assert len(scheduler.state.running) == running, "someone came in"
    whole, deciding = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
    return Row(running, waiting, round(whole, 1), round(deciding, 1))


def bytes_per_waiting(num: int = 2000) -> int:
    scheduler = filled(1, 0, "places")
    gc.collect()
    tracemalloc.start()
    for i in range(num):
        scheduler.add(request(1 + i, WAITING_PROMPT, 100))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used // num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON list of rows, and nothing else")
    parser.add_argument(
        "--waiting-for", choices=("blocks", "places"), default="blocks", help="what the waiting ones lack"
    )
    given = parser.parse_args()
    rows = [
        measure(running, waiting, given.waiting_for) for running in (1, 64, 1000) for waiting in (0, 10_000)
    ]
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    for row in rows:
        print(row)
    print(f"{bytes_per_waiting()} bytes for each waiting request of {WAITING_PROMPT} tokens")


if __name__ == "__main__":
    main()
