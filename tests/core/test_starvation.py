"""Nobody starves: long random histories in which somebody new comes for everyone who leaves.

The queue is never empty and the pool never large enough, so whatever could be passed over for ever is.
"""

import random

import pytest
from rig import build_rig

from legato.core.budget import TargetBudget
from legato.core.invariants import check_schedule
from legato.core.output_lengths import OutputLengthEstimator
from legato.core.plan import plan
from legato.core.prefill_policy import Chunked, FillBudget, PrefillPolicy, WholePrompt
from legato.core.prompt_order import MAX_OVERTAKEN, OVERDUE_STEPS
from legato.core.request import RequestId
from legato.core.scheduling_policy import Fair, Fcfs, Priority, SchedulingPolicy, Shortest
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepCost

LIVING, MAX_RUNNING, BUDGET, BLOCK, NUM_BLOCKS = 10, 6, 16, 4, 24
SHORT, LONG, REPLY = (1, 12), (40, 70), (1, 12)


def longest_pause(
    order: SchedulingPolicy, policy: PrefillPolicy, seed: int, *, num_steps: int, num_long: int
) -> int:
    """The most steps that any request goes without a token, from its arrival on and between two of them. Of
    the ten that live at any time `num_long` are long."""
    draw = random.Random(seed)
    rig = build_rig(
        budget=BUDGET,
        max_running=MAX_RUNNING,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        prefill_policy=policy,
        policy=order,
        output_lengths=OutputLengthEstimator(guess=4),
        min_chunk=4,
    )
    scheduler = rig.scheduler
    served: dict[RequestId, int] = {}
    longest = number = 0
    for step in range(num_steps):
        while len(served) < LIVING:
            is_long = sum(request_id.startswith("long") for request_id in served) < num_long
            number += 1
            num_prompt = draw.randint(*(LONG if is_long else SHORT))
            prompt = [draw.randrange(100) for _ in range(num_prompt)]
            request = rig.add(f"{'long' if is_long else 'short'}{number}", prompt, draw.randint(*REPLY))
            served[request.id] = step
        schedule = scheduler.schedule(0.0)
        scheduler.commit(schedule)
        scheduler.complete(rig.runner.run(plan(scheduler.state, schedule)), 0.0)
        served |= {run.request_id: step for run in schedule.runs}
        longest = max(longest, *(step - last for last in served.values()))
        served = {
            i: last
            for i, last in served.items()
            if i in scheduler.state.running or i in scheduler.state.waiting
        }
    return longest


@pytest.mark.parametrize("num_long", [1, 3])
@pytest.mark.parametrize("policy", [FillBudget(), Chunked(5), WholePrompt()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("order", [Fcfs(), Fair(), Shortest(1.0), Priority()], ids=lambda o: type(o).__name__)
def test_every_request_gets_tokens_within_a_bounded_number_of_steps(
    order: SchedulingPolicy, policy: PrefillPolicy, num_long: int
) -> None:
    """Each long one ages until it is first in the queue, then 32 others pass it at most; it may have to wait
    for the others of its kind. Replies and prompts of this size are through in few steps."""
    for seed in range(2):
        pause = longest_pause(order, policy, seed, num_steps=350, num_long=num_long)
        assert pause <= 2 * MAX_OVERTAKEN * (1 + num_long)


DEAR_FAR = StepCost(step=12e-3, head=6e-3, decode=1.5e-3, prefill=6e-4, context=0.0, pair=4e-6)
"""Tokens far into a text cost many times what they cost at its start."""


@pytest.mark.parametrize("far", [0, 320])
@pytest.mark.parametrize("target", [0.045, 0.06, 0.1])
def test_short_prompts_leave_a_long_one_its_chunk_however_far_it_is(target: float, far: int) -> None:
    """Enough of them come in every step to fill it, at the start of their texts or behind `far` tokens that
    are in the cache; a reply goes on, so that there is a target to keep."""
    model = CostModel(prior=DEAR_FAR)
    model.note = lambda shape, seconds: None  # type: ignore[method-assign]  # noqa: ARG005
    rig = build_rig(
        budget=512,
        max_running=32,
        num_blocks=1000,
        block_size=16,
        policy=Fair(),
        timed=TargetBudget(512, model, target=target, min_chunk=16),
        min_chunk=16,
    )
    scheduler, common = rig.scheduler, [7] * far
    rig.add("reply", 8, max_tokens=500)
    rig.step()
    rig.add("warm", [*common, 1], max_tokens=1)
    while "warm" in scheduler.state.running or "warm" in scheduler.state.waiting:
        rig.step()
    rig.add("long", 1_500, max_tokens=1)
    rig.step()
    last = longest = 0
    for step in range(150):
        for i in range(6):
            rig.add(f"{step}/{i}", [*common, step % 100, i, *range(8)], max_tokens=1)
        schedule = scheduler.schedule(0.0)
        check_schedule(scheduler.state, schedule)
        scheduler.commit(schedule)
        scheduler.complete(rig.runner.run(plan(scheduler.state, schedule)), 0.0)
        if any(chunk.request_id == "long" for chunk in schedule.chunks):
            longest, last = max(longest, step - last), step
    assert longest <= 1 + OVERDUE_STEPS
    assert step - last <= 1 + OVERDUE_STEPS
