"""One step being decided: the arithmetic of `Scheduler.schedule`, on numbers of its own.

A draft reads the scheduler and changes only itself. It keeps three balances: tokens left in the budget,
blocks left in the pool, and the sequences that still run.
"""

from typing import TYPE_CHECKING

from legato.core.request import RequestId
from legato.core.schedule import Chunk, Reason, Schedule
from legato.core.sequence import Sequence

if TYPE_CHECKING:
    from legato.core.scheduler import Scheduler


class Draft:
    """Call `place_decodes`, `place_started`, `place_waiting` once each, in this order, then `schedule`."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._budget = scheduler.config.max_batch_tokens
        self._free = scheduler.blocks.num_free
        self._running = list(scheduler.running.values())
        self._decodes: list[Chunk] = []
        self._chunks: list[Chunk] = []
        self._admitted: list[RequestId] = []
        self._preempted: list[RequestId] = []
        self._left_out: list[tuple[RequestId, Reason]] = []

    def place_decodes(self) -> None:
        """Every decode, oldest first. One that finds no free block takes those of the youngest sequence.

        The youngest is never one that was placed already: those are all older.
        """
        for sequence in tuple(self._running):
            if sequence.remaining != 1 or sequence.id in self._preempted:
                continue
            need = self._scheduler.blocks.blocks_for(sequence.num_known) - len(sequence.blocks)
            while need > self._free and sequence.id not in self._preempted:
                self._preempt(self._running.pop())
            if sequence.id not in self._preempted:
                self._free -= need
                self._budget -= 1
                self._decodes.append(Chunk(sequence.id, sequence.num_computed, 1, True))

    def place_started(self) -> None:
        """Prompts that hold their blocks already, oldest first."""
        for sequence in self._running:
            if sequence.remaining > 1 and not self._try_chunk(sequence):
                self._left_out.append((sequence.id, self._no_chunk_reason()))

    def place_waiting(self) -> None:
        """New prompts in the order of the queue, up to the first that cannot start."""
        for sequence in self._scheduler.waiting.values():
            reason = self._try_admit(sequence)
            if reason is not None:
                self._left_out.append((sequence.id, reason))
                return

    def schedule(self, step: int, now: float) -> Schedule:
        return Schedule(
            step=step,
            now=now,
            decodes=tuple(self._decodes),
            chunks=tuple(self._chunks),
            admitted=tuple(self._admitted),
            preempted=tuple(self._preempted),
            left_out=tuple(self._left_out),
        )

    def _preempt(self, sequence: Sequence) -> None:
        self._free += len(sequence.blocks)
        self._preempted.append(sequence.id)
        self._left_out.append((sequence.id, Reason.PREEMPTED))

    def _try_admit(self, sequence: Sequence) -> Reason | None:
        """Give a waiting sequence its blocks and a first chunk, or say why not."""
        if self._preempted:
            return Reason.PREEMPTION
        if len(self._running) + len(self._admitted) >= self._scheduler.config.max_running:
            return Reason.MAX_RUNNING
        if self._scheduler.blocks_to_admit(sequence) > self._free:
            return Reason.BLOCKS
        if not self._try_chunk(sequence):
            return self._no_chunk_reason()
        self._free -= self._scheduler.blocks.blocks_for(sequence.num_known)
        self._admitted.append(sequence.id)
        return None

    def _try_chunk(self, sequence: Sequence) -> bool:
        """Ask the policy for a chunk and hold its answer to the law.

        Never past the sequence's end, never over the budget, and never nothing in an empty step. The one
        exception to the budget is a whole prompt in a step of its own (`PrefillPolicy.whole`).
        """
        policy = self._scheduler.prefill_policy
        alone = not self._decodes and not self._chunks
        budget, remaining = max(self._budget, 0), sequence.remaining
        length = policy.chunk_len(remaining, budget, alone)
        length = min(max(length, int(alone)), remaining if policy.whole and alone else min(remaining, budget))
        if length < 1:
            return False
        last = length == remaining
        self._chunks.append(Chunk(sequence.id, sequence.num_computed, length, last))
        self._budget -= length
        return True

    def _no_chunk_reason(self) -> Reason:
        return Reason.BUDGET if self._budget < 1 else Reason.POLICY
