"""What steps cost on this machine: a few seconds of made-up steps, run before any request comes.

The right chunk size is measured, not derived. The steps are those that prices differ on: decodes few and
many, with short and long contexts; chunks short and long, at the start of a text and far into it; and both
together. Knows the `Runner` protocol and nothing of models.
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
"""Times that every step is measured; other programs disturb some of them."""
LONGEST_S, LONGEST_STEPS = 1.0, 4
"""A step that is expected to take longer, and longer than this number of single decodes, is left out: larger
ones follow from the smaller."""
DECODES = (1, 4, 16, 64)
CHUNKS = (32, 64, 128, 256, 512)
SHORT, LONG = 64, 4096
"""Contexts."""
DISTURBED = 3.0
"""A step that took so many times what all of them together predict was held up by something else: it says
nothing about steps."""
FIRST_ROUND = 3
"""The first round may take so many times as long as all of them should: without it, larger steps of a slow
model would be guessed."""
OWN_STEPS, OWN_SHARE = 24, 0.1
"""Steps over which the engine's own time is taken, and the most of the calibration that they may last."""


def calibrate(
    runner: Runner,
    config: SchedulerConfig,
    *,
    max_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[StepShape, float], ...]:
    """Run and time steps, for about `max_seconds`; where one round takes longer, for at most `FIRST_ROUND`
    times as long. Returns each shape with the seconds that it took, one at least. Steps that were held up are
    left out.

    A step is what there is from the tokens before it to its own: to the model's part, timed for each shape,
    comes what the engine itself takes between two of them, timed once.

    The KV cache must be unused: what is written to it belongs to nobody.
    """
    plans = list(_plans(runner, config))
    samples: list[tuple[StepShape, float]] = []
    runner.run(plans[0])  # whatever the first step sets up is not the price of a step, however long it takes
    own = engine_seconds(runner, config, clock=clock, max_seconds=OWN_SHARE * max_seconds)
    started = clock()
    runner.run(plans[0])
    first = max(clock() - started, MIN_STEP_PRICE) + own
    # with prices of another scale nearly all steps of a slow model would seem to be held up
    model = CostModel(prior=PRIOR.times(first / PRIOR.seconds(plans[0].shape)))
    began = clock()
    for number in range(1, ROUNDS + 1):
        progress(f"measuring what steps cost, round {number} of {ROUNDS}")
        for plan in plans:
            shape = plan.shape
            end = began + max_seconds * (FIRST_ROUND if number == 1 else 1)
            if clock() > end or model.cost.seconds(shape) > max(LONGEST_S, LONGEST_STEPS * first):
                continue
            started = clock()
            runner.run(plan)
            seconds = clock() - started + own
            model.observe(shape, seconds)
            samples.append((shape, seconds))
    return tuple(s for s in samples if s[1] <= DISTURBED * model.cost.seconds(s[0])) or tuple(samples)


def engine_seconds(
    runner: Runner, config: SchedulerConfig, *, clock: Callable[[], float], max_seconds: float
) -> float:
    """What scheduling, planning and telling add to a step of the model: the median over some steps in which
    eight sequences decode. 0 if the KV cache has no room for them."""
    num = min(8, config.max_running)
    longest = min(config.max_model_len, runner.num_blocks // num * runner.block_size)
    if longest < 4:
        return 0.0
    engine = Engine(Scheduler(config, BlockPool(runner.num_blocks, runner.block_size)), runner, clock=clock)
    times = _Times()
    engine.observe(times)
    params = SamplingParams(max_tokens=min(OWN_STEPS, longest - 1), temperature=0.0)
    for number in range(num):
        request_id = RequestId(f"calibration {number}")
        engine.submit(Request(id=request_id, prompt=(number,), params=params, arrival=clock()))
    end = clock() + max_seconds
    while engine.has_work and clock() < end:
        engine.step()
    own = [later - earlier - model for (earlier, _), (later, model) in pairwise(times.steps)]
    return max(median(own), 0.0) if own else 0.0


class _Times:
    """An observer: when each step ended, and how long the model took."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def submitted(self, request: Request) -> None: ...

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None: ...

    def stepped(self, record: StepRecord) -> None:
        self.steps.append((record.ended, record.model_time))


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
