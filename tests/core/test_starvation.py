"""Nobody starves: long random histories in which somebody new comes for everyone who leaves.

The queue is never empty and the pool never large enough, so whatever could be passed over for ever is.
"""

import random

import pytest
from rig import build_rig

from legato.core.draft import MAX_OVERTAKEN
from legato.core.order import Fair, Fcfs, Order, Priority, Shortest
from legato.core.plan import plan
from legato.core.prefill import Chunked, FillBudget, PrefillPolicy, WholePrompt
from legato.core.replies import ReplyLengths
from legato.core.request import RequestId

LIVING, MAX_RUNNING, BUDGET, BLOCK, NUM_BLOCKS = 10, 6, 16, 4, 24
SHORT, LONG, REPLY = (1, 12), (40, 70), (1, 12)


def longest_pause(order: Order, policy: PrefillPolicy, seed: int, *, num_steps: int, num_long: int) -> int:
    """The most steps that any request goes without a token, from its arrival on and between two of them. Of
    the ten that live at any time `num_long` are long."""
    draw = random.Random(seed)
    rig = build_rig(
        budget=BUDGET,
        max_running=MAX_RUNNING,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        policy=policy,
        order=order,
        replies=ReplyLengths(guess=4),
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
        scheduler.complete(rig.runner.run(plan(scheduler, schedule)), 0.0)
        served |= {run.request_id: step for run in schedule.runs}
        longest = max(longest, *(step - last for last in served.values()))
        served = {i: last for i, last in served.items() if i in scheduler.running or i in scheduler.waiting}
    return longest


@pytest.mark.parametrize("num_long", [1, 3])
@pytest.mark.parametrize("policy", [FillBudget(), Chunked(5), WholePrompt()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("order", [Fcfs(), Fair(), Shortest(1.0), Priority()], ids=lambda o: type(o).__name__)
def test_every_request_gets_tokens_within_a_bounded_number_of_steps(
    order: Order, policy: PrefillPolicy, num_long: int
) -> None:
    """Each long one ages until it is first in the queue, then 32 others pass it at most; it may have to wait
    for the others of its kind. Replies and prompts of this size are through in few steps."""
    for seed in range(2):
        pause = longest_pause(order, policy, seed, num_steps=350, num_long=num_long)
        assert pause <= 2 * MAX_OVERTAKEN * (1 + num_long)
