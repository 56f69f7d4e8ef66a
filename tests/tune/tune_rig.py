"""Costs that are known exactly, and trials without a simulation."""

from collections.abc import Sequence

from legato.config import EngineSettings
from legato.cost.step_cost import StepCost, StepShape
from legato.engine.cost_file import CostFile, Sample
from legato.metrics.summary import Latencies, distribution
from legato.metrics.timeline import Targets
from legato.sim.report import Report
from legato.tune.setup import Setup
from legato.tune.trial import Bench, Trial
from legato.workload.arrival import Arrival, alone

COST = StepCost(step=0.01, head=0, decode=0.001, prefill=0.0005, context=0, pair=0)
"""10 ms a step, 1 ms a decode, 0.5 ms a token of a prompt."""
SHAPES = [
    StepShape(decodes, prefill, decodes * context, (2 * context + prefill) * prefill, True)
    for decodes in (0, 1, 8, 32)
    for prefill in (0, 64, 512)
    for context in (100, 2000)
    if decodes + prefill
]


def known_costs(cost: StepCost = COST) -> CostFile:
    return CostFile(
        model="a-model",
        measured_on={"machine": "an abacus"},
        vocab_size=1000,
        max_model_len=4096,
        block_size=16,
        num_blocks=2048,
        samples=tuple(Sample(**s._asdict(), seconds=cost.seconds(s)) for s in SHAPES * 4),
    )


def arrivals(num: int, gap: float, *, prompt: int = 200, output: int = 20) -> tuple[Arrival, ...]:
    return tuple(
        Arrival(time=i * gap, parts=alone(f"prompt {i}", prompt), output_length=output) for i in range(num)
    )


def bench(
    workload: Sequence[Arrival], *, tpot_ms: float = 100.0, ttft: float | None = 2.0, noise: bool = False
) -> Bench:
    return Bench(
        engine=EngineSettings(tpot_target_ms=tpot_ms),
        costs=known_costs(),
        arrivals=workload,
        targets=Targets(tpot=tpot_ms / 1000, ttft=ttft),
        noise=noise,
    )


def trial(setup: Setup, *, good: float, ttft: float, gap: float, num_steps: int = 100) -> Trial:
    """A trial with these numbers."""
    return Trial(
        setup=setup,
        report=Report(
            duration=1.0,
            num_requests=10,
            finished={"length": 10},
            latencies=Latencies(
                ttft=distribution([ttft]),
                itl=distribution([gap]),
                stall=distribution([gap]),
                tpot=None,
                e2e=None,
                queue_time=None,
            ),
            good=good,
            goodput=good,
            gaps_over=None,
            prompt_rate=1.0,
            output_rate=1.0,
            num_steps=num_steps,
            limits={"target": num_steps},
            busy=0.5,
            max_running=3,
            max_waiting=0,
            max_blocks=0.1,
            num_preemptions=0,
        ),
    )
