"""Costs that are known, and an engine on the fake runner that serves a workload as a server's loop does."""

import json
from collections.abc import Sequence

from legato.core.invariants import check_state
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.core.scheduler import Scheduler
from legato.core.step_plan import StepPlan
from legato.cost.cost_model import PRIOR
from legato.cost.step_cost import StepCost, StepShape
from legato.engine.cost_file import CostFile, Sample
from legato.engine.engine import Engine
from legato.engine.fake import FakeRunner
from legato.errors import RequestError
from legato.metrics.journal import StepRecord
from legato.sim.simulator import request_of
from legato.sim.times import SimulatedClock, StepTimes
from legato.workload.arrival import Arrival

SHAPES = [
    StepShape(decodes, prefill, decodes * context, (2 * context + prefill) * prefill, decodes > 0)
    for decodes in (0, 1, 8, 32)
    for prefill in (0, 64, 512)
    for context in (100, 2000)
    if decodes + prefill
]


def known_costs(cost: StepCost = PRIOR, *, num_blocks: int = 512, vocab_size: int = 1 << 18) -> CostFile:
    """A file of steps that took exactly what `cost` says."""
    samples = tuple(
        Sample(**shape._asdict(), seconds=cost.seconds(shape)) for _ in range(4) for shape in SHAPES
    )
    return CostFile(
        model="a-model",
        measured_on={"machine": "a made-up machine"},
        vocab_size=vocab_size,
        max_model_len=8192,
        block_size=32,
        num_blocks=num_blocks,
        samples=samples,
    )


class Lines:
    """An observer that keeps the lines of the journal."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def submitted(self, request: Request) -> None: ...

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:
        self.lines.append(f"{request_id} {reason} {now}")

    def stepped(self, record: StepRecord) -> None:
        self.lines.append(json.dumps(record.to_json()))


def serve_for_real(scheduler: Scheduler, arrivals: Sequence[Arrival], times: StepTimes) -> list[str]:
    """The journal of an engine with a fake runner, whose loop takes all that came before each step."""
    clock, pool = SimulatedClock(), scheduler.state.pool

    def seconds(plan: StepPlan) -> float:
        return times(plan.shape)

    runner = FakeRunner(
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        vocab_size=scheduler.state.config.vocab_size,
        step_seconds=seconds,
        sleep=clock.advance,
        choose=lambda _, __: 0,  # a reply is the beginning of nobody's prompt, as it is simulated
    )
    engine, lines = Engine.on_runner(scheduler, runner, clock=clock), Lines()
    engine.observe(lines)
    inbox: list[tuple[float, bool, int]] = []
    for number, arrival in enumerate(arrivals):
        inbox.append((arrival.time, True, number))
        if arrival.patience is not None:
            inbox.append((arrival.time + arrival.patience, False, number))
    inbox.sort()
    while inbox or engine.has_work:
        if not engine.has_work:
            clock.now = max(clock.now, inbox[0][0])
        while inbox and inbox[0][0] <= clock.now:
            _, comes, number = inbox.pop(0)
            if not comes:
                engine.abort(RequestId(str(number)))
                continue
            try:
                engine.submit(
                    request_of(number, arrivals[number], range(1, scheduler.state.config.vocab_size))
                )
            except RequestError:
                lines.lines.append(f"{number} refused")
        if engine.has_work:
            engine.step()
        check_state(scheduler.state)
    return lines.lines
