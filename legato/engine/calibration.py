"""What steps cost on this machine: a few seconds of made-up steps, run before any request comes.

The right chunk size is measured, not derived. The steps are those that prices differ on: decodes few and
many, with short and long contexts; chunks short and long, at the start of a text and far into it; and both
together. Knows the `Runner` protocol and nothing of models.
"""

import random
import time
from collections.abc import Callable, Iterator

from legato.core.cost import CostModel, StepShape
from legato.core.plan import ForwardBatch, ForwardSeq, SampleRow, StepPlan
from legato.core.request import RequestId, SamplingParams
from legato.core.scheduler import SchedulerConfig
from legato.engine.protocol import Runner

ROUNDS = 3
"""Times that every step is measured; other programs disturb some of them."""
LONGEST_S = 1.0
"""A step that is expected to take longer is left out: larger ones follow from the smaller."""
DECODES = (1, 4, 16, 64)
CHUNKS = (32, 64, 128, 256, 512)
SHORT, LONG = 64, 4096
"""Contexts."""


def calibrate(
    runner: Runner,
    config: SchedulerConfig,
    *,
    max_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[StepShape, float], ...]:
    """Run and time steps, for about `max_seconds` at most; each shape with the seconds that it took, one at
    least.

    The KV cache must be unused: what is written to it belongs to nobody.
    """
    plans = list(_plans(runner, config))
    model = CostModel()
    samples: list[tuple[StepShape, float]] = []
    runner.run(plans[0])  # whatever the first step sets up is not the price of a step, however long it takes
    end = clock() + max_seconds
    for number in range(1, ROUNDS + 1):
        progress(f"measuring what steps cost, round {number} of {ROUNDS}")
        for plan in plans:
            if clock() > end:
                return tuple(samples)
            shape = plan.shape
            if model.cost.seconds(shape) > LONGEST_S:
                continue
            started = clock()
            runner.run(plan)
            seconds = clock() - started
            model.note(shape, seconds)
            samples.append((shape, seconds))
    return tuple(samples)


def _plans(runner: Runner, config: SchedulerConfig) -> Iterator[StepPlan]:
    """Small ones first. None larger than the settings or the KV cache."""
    capacity = min(config.max_model_len, runner.num_blocks * runner.block_size)
    decodes = [num for num in DECODES if num < config.max_running] + [config.max_running]
    chunks = [length for length in CHUNKS if length <= min(config.max_batch_tokens, capacity)]
    far = min(LONG, capacity // 2)
    beside = min(8, config.max_running)
    for num in decodes:
        for context in (SHORT, far):
            yield _plan(runner, config, num, min(context, capacity - 1), 0, 0)
    for length in chunks:
        yield _plan(runner, config, 0, 0, 0, length)
        for start in (0, far):
            if start + length <= capacity and beside + length <= config.max_batch_tokens:
                yield _plan(runner, config, beside, min(512, capacity - 1), start, length)


def _plan(
    runner: Runner, config: SchedulerConfig, num_decodes: int, context: int, start: int, length: int
) -> StepPlan:
    """Decodes at position `context`, and a chunk in the middle of a prompt unless `length` is 0."""
    draw = random.Random(length)
    num_blocks, size = runner.num_blocks, runner.block_size
    seqs: list[ForwardSeq] = []
    first = 0
    for at, count in [(context, 1)] * num_decodes + [(start, length)] * (length > 0):
        needed = -(-(at + count) // size)
        blocks = tuple((first + i) % num_blocks for i in range(needed))  # their own, as long as there are
        tokens = tuple(draw.randrange(config.vocab_size) for _ in range(count))
        seqs.append(ForwardSeq(RequestId(f"calibration {len(seqs)}"), tokens, at, blocks))
        first += needed
    params = SamplingParams(max_tokens=1, temperature=0.0)
    rows = tuple(SampleRow(i, seqs[i].request_id, params, 0) for i in range(num_decodes))
    return StepPlan(ForwardBatch(tuple(seqs)), rows)
