"""Which prompt comes first: the policies, each a pure ordering.

An order gives every sequence a key; the least comes first. Keys do not change while a sequence waits, so the
queue is sorted once, where it is entered. What ages a sequence is in the keys of those that come later.

All orders put preempted sequences before those that never ran: their work is already paid for in part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from legato.core.sequence import Sequence

Key = tuple[float, ...]


class Order(Protocol):
    """Orders the prompts of a step, started and waiting ones alike. Decodes come before all of them."""

    @property
    def ending_share(self) -> float:
        """The share of a step's prompt tokens that is kept for prompts that end in this step."""
        ...

    def key(self, sequence: "Sequence") -> Key:
        """Unique among sequences; constant while it waits."""
        ...


def _never_ran(sequence: "Sequence") -> bool:
    return sequence.num_preemptions == 0


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served."""

    ending_share = 0.0

    def key(self, sequence: "Sequence") -> Key:
        return (_never_ran(sequence), sequence.number)


@dataclass(frozen=True, slots=True)
class Fair:
    """Fair queueing: first comes who would be through first if all prompts shared every step equally.

    Virtual time is what each prompt would have got by now under equal shares, so entry + size is when one
    would be through (Demers, Keshav, Shenker 1989). Served in this order a prompt is hardly ever later than
    under equal shares, mostly earlier, and steps hold a few long chunks instead of a crumb of every prompt.
    Under overload virtual time runs a little faster than equal shares would have it, so that nobody starves.
    """

    ending_share = 0.5

    def key(self, sequence: "Sequence") -> Key:
        return (_never_ran(sequence), sequence.entry_time + sequence.size, sequence.number)


@dataclass(frozen=True, slots=True)
class Shortest:
    """The fewest tokens to compute first. A prompt that waits counts as `ageing` tokens shorter each step."""

    ageing: float
    ending_share = 0.0

    def key(self, sequence: "Sequence") -> Key:
        aged = sequence.size + self.ageing * sequence.entry_step
        return (_never_ran(sequence), aged, sequence.number)


@dataclass(frozen=True, slots=True)
class Priority:
    """The lowest `Request.priority` first (as vLLM), then first come. The urgent may starve others."""

    ending_share = 0.0

    def key(self, sequence: "Sequence") -> Key:
        return (sequence.request.priority, _never_ran(sequence), sequence.number)


ORDERS: dict[str, Callable[[int], Order]] = {
    "fair": lambda _: Fair(),
    "fcfs": lambda _: Fcfs(),
    "shortest": lambda max_batch_tokens: Shortest(ageing=max_batch_tokens / 16),
    "priority": lambda _: Priority(),
}
"""By the name of the setting, made for a token budget."""
