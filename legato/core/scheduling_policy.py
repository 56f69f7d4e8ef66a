"""The order in which prompts are scheduled.

A policy gives each sequence a key, and the smallest key comes first. The key of a waiting sequence never
changes, so the queue is sorted once, at insertion. Ageing is expressed in the keys of later arrivals.

All policies put preempted sequences before sequences that never ran, because part of their work was already
done.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from legato.core.sequence import Sequence

Key = tuple[float, ...]


class SchedulingPolicy(Protocol):
    """Orders the prompts of a step, both started and waiting. Decodes come before all prompts."""

    @property
    def ending_share(self) -> float:
        """The share of a step's prompt tokens that is reserved for prompts that end in this step."""
        ...

    def key(self, sequence: Sequence) -> Key:
        """The sort key. Unique among sequences, and constant while a sequence waits."""
        ...


def _never_ran(sequence: Sequence) -> bool:
    return sequence.num_preemptions == 0


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served."""

    ending_share = 0.0

    def key(self, sequence: Sequence) -> Key:
        return (_never_ran(sequence), sequence.arrival_index)


@dataclass(frozen=True, slots=True)
class Fair:
    """Fair queueing: the prompt that would finish first if all prompts shared every step equally comes first.

    Virtual time counts the tokens that each prompt would have received so far under equal shares. So arrival
    time plus length is when a prompt would finish (Demers, Keshav, Shenker 1989). In this order a prompt
    finishes hardly ever later than under equal shares and mostly earlier, and a step has a few long chunks
    instead of a short chunk of every prompt. Under overload, virtual time advances a little faster than
    equal shares would have it, so that no prompt starves.
    """

    ending_share = 0.5

    def key(self, sequence: Sequence) -> Key:
        finish = sequence.arrival_virtual_time + sequence.num_uncached_at_arrival
        return (_never_ran(sequence), finish, sequence.arrival_index)


@dataclass(frozen=True, slots=True)
class Shortest:
    """The fewest tokens to compute first. In each step, waiting prompts count as `ageing` tokens shorter."""

    ageing: float
    ending_share = 0.0

    def key(self, sequence: Sequence) -> Key:
        aged = sequence.num_uncached_at_arrival + self.ageing * sequence.arrival_step
        return (_never_ran(sequence), aged, sequence.arrival_index)


@dataclass(frozen=True, slots=True)
class Priority:
    """The lowest `Request.priority` first, as in vLLM, then first come. Urgent requests can starve others."""

    ending_share = 0.0

    def key(self, sequence: Sequence) -> Key:
        return (sequence.request.priority, _never_ran(sequence), sequence.arrival_index)


SCHEDULING_POLICIES: dict[str, Callable[[int], SchedulingPolicy]] = {
    "fair": lambda _: Fair(),
    "fcfs": lambda _: Fcfs(),
    "shortest": lambda max_batch_tokens: Shortest(ageing=max_batch_tokens / 16),
    "priority": lambda _: Priority(),
}
"""The name of the setting -> a function from `max_batch_tokens` to the policy."""
