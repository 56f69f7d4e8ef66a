"""Measures what steps cost on this machine: a few seconds of made-up steps before any request arrives.

The measured steps differ in what the prices differ on: few and many decodes, with short and long contexts;
short and long chunks, at the start of a text and deep in it; and both together. This module knows the
`Runner` protocol and no models.
"""

import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median

from legato.core.block_pool import BlockPool
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.core.scheduler import Scheduler
from legato.core.state import SchedulerConfig
from legato.core.step_plan import ForwardBatch, ForwardSeq, SampleRow, StepPlan
from legato.cost.cost_model import MIN_STEP_PRICE, PRIOR, CostModel
from legato.cost.step_cost import StepShape
from legato.engine.engine import Engine
from legato.engine.protocol import Runner
from legato.metrics.journal import StepRecord
from legato.sampling_params import SamplingParams

ROUNDS = 3
"""How often each step is measured, because other programs disturb some of them."""
MAX_STEP_S, MAX_STEP_DECODES = 1.0, 4
"""A step is left out if it is predicted to take longer than this many seconds and than this many single
decodes. The costs of larger steps follow from smaller ones."""
DECODES = (1, 4, 16, 64)
CHUNKS = (32, 64, 128, 256, 512)
SHORT_CONTEXT, LONG_CONTEXT = 64, 4096
OUTLIER_RATIO = 3.0
"""A step that took more than this multiple of the final prediction was disturbed, and is left out."""
FIRST_ROUND_FACTOR = 3
"""The first round may take this multiple of the time for all rounds. Otherwise the larger steps of a slow
model would not be measured at all."""
OVERHEAD_STEPS, OVERHEAD_SHARE = 24, 0.1
"""The engine's own time is measured over this many steps, and for at most this share of the calibration."""


def calibrate(
    runner: Runner,
    config: SchedulerConfig,
    *,
    max_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[StepShape, float], ...]:
    """Run and time steps for about `max_seconds`, or for `FIRST_ROUND_FACTOR` times as long if one round
    takes longer.

    Returns (shape, seconds) of each measured step, at least one. Disturbed steps are left out.

    The time of a step is the time between the tokens before it and its own tokens. So it is the model's
    time, which is measured for each shape, plus the engine's time between two steps, which is measured once.

    The KV cache must be unused, because its content is overwritten.
    """
    plans = list(_plans(runner, config))
    samples: list[tuple[StepShape, float]] = []
    runner.run(plans[0])  # The first step also sets things up. Its time is not the price of a step.
    overhead = engine_seconds(runner, config, clock=clock, max_seconds=OVERHEAD_SHARE * max_seconds)
    started = clock()
    runner.run(plans[0])
    first = max(clock() - started, MIN_STEP_PRICE) + overhead
    # With prices of another scale, nearly all steps of a slow model would look disturbed.
    model = CostModel(prior=PRIOR.times(first / PRIOR.seconds(plans[0].shape)))
    began = clock()
    for number in range(1, ROUNDS + 1):
        progress(f"measuring what steps cost, round {number} of {ROUNDS}")
        for plan in plans:
            shape = plan.shape
            end = began + max_seconds * (FIRST_ROUND_FACTOR if number == 1 else 1)
            if clock() > end or model.cost.seconds(shape) > max(MAX_STEP_S, MAX_STEP_DECODES * first):
                continue
            started = clock()
            runner.run(plan)
            seconds = clock() - started + overhead
            model.observe(shape, seconds)
            samples.append((shape, seconds))
    undisturbed = (s for s in samples if s[1] <= OUTLIER_RATIO * model.cost.seconds(s[0]))
    return tuple(undisturbed) or tuple(samples)


def engine_seconds(
    runner: Runner, config: SchedulerConfig, *, clock: Callable[[], float], max_seconds: float
) -> float:
    """The seconds that the engine adds to a step of the model: the median over steps with eight decodes.

    0 if the KV cache has no room for eight sequences.
    """
    num = min(8, config.max_running)
    max_length = min(config.max_model_len, runner.num_blocks // num * runner.block_size)
    if max_length < 4:
        return 0.0
    pool = BlockPool(runner.num_blocks, runner.block_size)
    engine = Engine.on_runner(Scheduler(config, pool), runner, clock=clock)
    times = _StepTimes()
    engine.observe(times)
    params = SamplingParams(max_tokens=min(OVERHEAD_STEPS, max_length - 1), temperature=0.0)
    for number in range(num):
        request_id = RequestId(f"calibration {number}")
        engine.submit(Request(id=request_id, prompt=(number,), params=params, arrival=clock()))
    end = clock() + max_seconds
    while engine.has_work and clock() < end:
        engine.step()
    overheads = [later - earlier - model for (earlier, _), (later, model) in pairwise(times.steps)]
    return max(median(overheads), 0.0) if overheads else 0.0


class _StepTimes:
    """An observer that records when each step ended and how long the model took."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def submitted(self, request: Request) -> None: ...

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None: ...

    def stepped(self, record: StepRecord) -> None:
        self.steps.append((record.ended, record.model_time))


def _plans(runner: Runner, config: SchedulerConfig) -> Iterator[StepPlan]:
    """The steps to measure, small ones first. None is larger than the settings or the KV cache allow."""
    capacity = min(config.max_model_len, runner.num_blocks * runner.block_size)
    decodes = [num for num in DECODES if num < config.max_running] + [config.max_running]
    chunks = [length for length in CHUNKS if length <= min(config.max_batch_tokens, capacity)]
    deep = min(LONG_CONTEXT, capacity // 2)
    beside = min(8, config.max_running)
    for num in decodes:
        for context in (SHORT_CONTEXT, deep):
            yield _plan(runner, config, num, min(context, capacity - 1), 0, 0)
    for length in chunks:
        yield _plan(runner, config, 0, 0, 0, length)
        for start in (0, deep):
            if start + length <= capacity and beside + length <= config.max_batch_tokens:
                yield _plan(runner, config, beside, min(512, capacity - 1), start, length)


def _plan(
    runner: Runner, config: SchedulerConfig, num_decodes: int, context: int, start: int, length: int
) -> StepPlan:
    """Decodes at position `context`, and a chunk in the middle of a prompt unless `length` is 0."""
    draw = random.Random(length)
    num_blocks, block_size = runner.num_blocks, runner.block_size
    runs = [(context, 1)] * num_decodes
    if length:
        runs.append((start, length))
    seqs: list[ForwardSeq] = []
    first = 0
    for position, count in runs:
        needed = -(-(position + count) // block_size)
        blocks = tuple((first + i) % num_blocks for i in range(needed))  # Shared only if there are too few.
        tokens = tuple(draw.randrange(config.vocab_size) for _ in range(count))
        seqs.append(ForwardSeq(RequestId(f"calibration {len(seqs)}"), tokens, position, blocks))
        first += needed
    params = SamplingParams(max_tokens=1, temperature=0.0)
    rows = tuple(SampleRow(i, seqs[i].request_id, params, 0) for i in range(num_decodes))
    return StepPlan(ForwardBatch(tuple(seqs)), rows)
