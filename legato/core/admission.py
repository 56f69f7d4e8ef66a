"""Who may leave the queue: the arithmetic of blocks that are promised but not yet taken.

A sequence takes blocks for all its known tokens when it is admitted, and more as its reply grows. Admission
looks ahead: what runs must be able to grow as far as expected, and the newcomer as well.

    room = free blocks - watermark - expected growth of all that run

How far a reply is expected to grow is learned (`ReplyLengths`). `caution` moves it towards the most that the
request may ask for: it is 1 right after a preemption and fades over the next steps, so that what was
preempted does not come back only to be preempted again.

A *guaranteed* sequence is never preempted: it is admitted only if all guaranteed ones together can grow to
their very end. Strict admission guarantees everyone; otherwise it is who was preempted `MAX_PREEMPTIONS`
times, which bounds what any request is computed again.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from legato.core.sequence import Sequence

if TYPE_CHECKING:
    from legato.core.scheduler import Scheduler

MAX_PREEMPTIONS = 3
WATERMARK = 0.01
"""Share of the pool that newcomers leave free for those that run."""


class Admission:
    """The room for newcomers in one step. Reads the scheduler; `admit` changes only what is left here."""

    def __init__(self, scheduler: "Scheduler", running: Iterable[Sequence]) -> None:
        """`running` are the sequences that go on holding their blocks."""
        self._scheduler = scheduler
        self._pool = scheduler.blocks
        self._running = list(running)
        self._room = self._pool.num_free
        if self._running:
            growth = sum(self._end_blocks(s) - len(s.blocks) for s in self._running)
            self._room -= growth + int(WATERMARK * self._pool.num_blocks)
        self._pinned: set[int] = set()
        """Cached blocks that those admitted in this step share: no longer free."""
        self._promised = 0
        """Blocks to the very end of the guaranteed sequences that were admitted in this step."""
        self._empty = not self._running

    def may_fit(self, sequence: Sequence) -> bool:
        """Whether there is room for it if all that it could share were held by others. Cheap."""
        return self._empty or self._end_blocks(sequence) - len(sequence.chain) < self._room

    def fits(self, sequence: Sequence, found: list[int]) -> bool:
        """Whether there is room for a sequence that finds the blocks `found` computed."""
        shared = self._num_held(found)
        if self._empty:
            return self._pool.blocks_for(sequence.num_known) - shared <= self._room
        if self._end_blocks(sequence) - shared > self._room:
            return False
        # In strict mode everyone's end is in the room already.
        return self._scheduler.config.strict or not sequence.guaranteed or self._can_guarantee(sequence)

    def admit(self, sequence: Sequence, found: list[int]) -> None:
        """Take the room for it."""
        self._room -= self._end_blocks(sequence) - self._num_held(found)
        self._pinned.update(found)
        if sequence.guaranteed:
            self._promised += self._full_blocks(sequence)
        if self._empty:
            self._room -= int(WATERMARK * self._pool.num_blocks)
        self._empty = False

    def _num_held(self, found: list[int]) -> int:
        return sum(1 for block in found if self._pool.holders(block) or block in self._pinned)

    def _end_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence is expected to hold at its end."""
        full = sequence.request.max_computed
        if sequence.guaranteed:
            return self._pool.blocks_for(full)
        expected = sequence.num_known + self._scheduler.replies.remaining(sequence.num_generated) - 1
        end = expected + self._scheduler.caution * (full - expected)
        return self._pool.blocks_for(min(math.ceil(end), full))

    def _full_blocks(self, sequence: Sequence) -> int:
        return self._pool.blocks_for(sequence.request.max_computed)

    def _can_guarantee(self, sequence: Sequence) -> bool:
        """Whether all guaranteed sequences and this one can hold all that they can ever need at once."""
        guaranteed = [other for other in self._running if other.guaranteed]
        held = {block for other in guaranteed for block in other.blocks}
        growth = sum(self._full_blocks(other) - len(other.blocks) for other in guaranteed)
        need = len(held) + growth + self._promised + self._full_blocks(sequence)
        return need <= self._pool.num_blocks
