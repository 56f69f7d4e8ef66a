"""The order in which a step considers prompts, and which waiting prompts must not be overtaken."""

from dataclasses import dataclass

from legato.core.request import RequestId
from legato.core.scheduling_policy import Key
from legato.core.sequence import Sequence
from legato.core.state import SchedulerState

MAX_OVERTAKEN = 32
"""How often the first sequence of the queue may be overtaken while it finds no blocks, no place or no
step."""
OVERDUE_STEPS = 16
"""A started prompt without a token for more steps than this comes first, whatever the policy says."""


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The prompts of a step."""

    prompts: list[Sequence]
    """Started and waiting prompts, in the order in which they are considered."""
    behind: dict[RequestId, RequestId]
    """Waiting sequence -> the last sequence ahead of it that it must not overtake."""


def order_prompts(
    state: SchedulerState, started: list[Sequence], waiting: list[tuple[Key, Sequence]]
) -> PromptOrder:
    """Overdue prompts come first, then all others in the order of the scheduling policy.

    `waiting` is the head of the queue with its keys. A sequence that was preempted, or overtaken too often,
    must not be overtaken any more.
    """
    behind: dict[RequestId, RequestId] = {}
    barrier: RequestId | None = None
    for _, sequence in waiting:
        if barrier is not None:
            behind[sequence.id] = barrier
        if sequence.num_preemptions or sequence.num_overtaken >= MAX_OVERTAKEN:
            barrier = sequence.id
    if not started:
        return PromptOrder([sequence for _, sequence in waiting], behind)
    keyed = [(state.step - s.last_step <= OVERDUE_STEPS, state.policy.key(s), s) for s in started]
    keyed += [(True, key, sequence) for key, sequence in waiting]
    return PromptOrder([sequence for _, _, sequence in sorted(keyed)], behind)
