"""Who may leave the queue: the arithmetic of blocks that are promised but not yet taken.

A sequence takes blocks for all its known tokens when it is admitted, and more as its reply grows. Admission
looks ahead: what runs must be able to grow as far as expected, and the newcomer as well.

    room = free blocks - watermark - expected growth of all that run

How far a reply is expected to grow is learned (`ReplyLengths`). `caution` moves it towards the most that the
request may ask for: it is 1 right after a preemption and fades over the next steps, so that what was
preempted does not come back only to be preempted again.

A *guaranteed* sequence is never preempted. Its expected need is all that it may ask for, as a newcomer and
while it runs: so all guaranteed ones together can always grow to their very end. Strict admission guarantees
everyone; otherwise it is who was preempted `MAX_PREEMPTIONS` times, which bounds what is computed again.
"""

import math
from typing import TYPE_CHECKING

from legato.core.sequence import Sequence

if TYPE_CHECKING:
    from legato.core.scheduler import Scheduler

MAX_PREEMPTIONS = 3
WATERMARK = 0.01
"""Share of the pool that newcomers leave free for those that run."""


class Admission:
    """The room for newcomers in one step. Reads the scheduler; `admit` changes only what is left here."""

    def __init__(self, scheduler: "Scheduler", running: list[Sequence]) -> None:
        """`running` are the sequences that go on holding their blocks."""
        self._scheduler = scheduler
        self._replies, self._caution = scheduler.replies, scheduler.caution
        self._pool = scheduler.blocks
        self._room = self._pool.num_free
        if running:
            growth = sum([self._end_blocks(s) - len(s.blocks) for s in running])
            self._room -= growth + int(WATERMARK * self._pool.num_blocks)
        self._pinned: set[int] = set()
        """Cached blocks that those admitted in this step share: no longer free."""
        self._empty = not running

    def try_find(self, sequence: Sequence) -> list[int] | None:
        """The blocks of a waiting sequence that are computed already; None if the others find no room."""
        need = self._pool.blocks_for(sequence.num_known) if self._empty else self._end_blocks(sequence)
        if need - len(sequence.chain) >= self._room:
            return None  # not even if all that it may share were held by others: no need to look
        found = self._scheduler.find_prefix(sequence)
        return found if need - self._num_held(found) <= self._room else None

    def admit(self, sequence: Sequence, found: list[int]) -> None:
        """Take the room for it."""
        self._room -= self._end_blocks(sequence) - self._num_held(found)
        self._pinned.update(found)
        if self._empty:
            self._room -= int(WATERMARK * self._pool.num_blocks)
        self._empty = False

    def _num_held(self, found: list[int]) -> int:
        return sum(1 for block in found if self._pool.holders(block) or block in self._pinned)

    def _end_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence is expected to hold at its end."""
        full = sequence.max_computed
        if sequence.guaranteed:
            return self._pool.blocks_for(full)
        num_known = len(sequence.tokens)
        expected = num_known + self._replies.remaining(num_known - len(sequence.request.prompt)) - 1
        end = math.ceil(expected + self._caution * (full - expected))
        return -(-(end if end < full else full) // self._pool.block_size)
