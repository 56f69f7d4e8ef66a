"""Which waiting sequences may start: how many blocks are free and not promised to running sequences.

A sequence takes blocks for all its known tokens when it is admitted, and more as its reply grows. Admission
looks ahead: all running sequences must be able to grow as far as expected, and so must the new one.

    room = free blocks - watermark - expected growth of all running sequences

The expected length of replies is learned (`OutputLengthEstimator`). `caution` moves the expectation towards
the most that a request may ask for. It is 1 right after a preemption and decays over the next steps, so that
a preempted sequence does not come back only to be preempted again.

A *guaranteed* sequence is never preempted. Its expected need is all that it may ask for, while it waits and
while it runs. So all guaranteed sequences together can always grow to their end. With strict admission every
sequence is guaranteed. Otherwise a sequence becomes guaranteed after `MAX_PREEMPTIONS` preemptions, which
bounds how much is computed again.
"""

import math

from legato.core.block_pool import BlockPool
from legato.core.sequence import Sequence
from legato.core.state import SchedulerState

MAX_PREEMPTIONS = 3
WATERMARK = 0.01
"""The share of the pool that new sequences leave free for running ones."""
PARTIAL_SHARE = 0.5
"""The share of the pool that partly computed prompts may hold together."""


class Admission:
    """The room for new sequences in one step. It reads the state; `admit` changes only its own counters."""

    def __init__(self, state: SchedulerState, running: list[Sequence]) -> None:
        """`running` are the sequences that keep their blocks in this step."""
        self._state = state
        self._pool = state.pool
        self._room = state.pool.num_free
        if running:
            growth = sum([self._final_blocks(s) - len(s.block_table) for s in running])
            self._room -= growth + self._watermark
        self._shared: set[int] = set()
        """Cached blocks that the sequences admitted in this step share. They are no longer free."""
        self._is_empty = not running

    @property
    def _watermark(self) -> int:
        return int(WATERMARK * self._pool.num_blocks)

    def find_room(self, sequence: Sequence) -> list[int] | None:
        """The blocks of a waiting sequence that are in the prefix cache. None if there is no room for the
        rest."""
        need = self._pool.blocks_for(sequence.num_known) if self._is_empty else self._final_blocks(sequence)
        if need - len(sequence.chain) >= self._room:
            return None  # There is no room even if all its shareable blocks are held: skip the look-up.
        found = self._state.find_prefix(sequence)
        return found if need - self._num_held(found) <= self._room else None

    def admit(self, sequence: Sequence, found: list[int]) -> None:
        """Use the room that `find_room` found."""
        self._room -= self._final_blocks(sequence) - self._num_held(found)
        self._shared.update(found)
        if self._is_empty:
            self._room -= self._watermark
        self._is_empty = False

    def _num_held(self, found: list[int]) -> int:
        return sum(1 for block in found if self._pool.num_holders(block) or block in self._shared)

    def _final_blocks(self, sequence: Sequence) -> int:
        """The number of blocks that a sequence is expected to hold at its end."""
        full = sequence.max_computed
        if sequence.guaranteed:
            return self._pool.blocks_for(full)
        num_known = len(sequence.tokens)
        num_generated = num_known - len(sequence.request.prompt)
        expected = num_known + self._state.output_lengths.remaining(num_generated) - 1
        end = math.ceil(expected + self._state.caution * (full - expected))
        return self._pool.blocks_for(end if end < full else full)


class PartialPrompts:
    """The blocks of prompts that are only partly computed after this step, and their limit.

    Partly computed prompts hold blocks and produce no tokens. Without a limit they could fill the pool.
    """

    def __init__(self, pool: BlockPool, started: list[Sequence]) -> None:
        """`started` are the prompts that run already."""
        self._pool = pool
        self._num_blocks = sum([len(sequence.block_table) for sequence in started])

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a waiting prompt may start without ending in this step. The first one always may."""
        num_blocks = self._num_blocks + self._pool.blocks_for(sequence.num_known)
        return self._num_blocks == 0 or num_blocks <= PARTIAL_SHARE * self._pool.num_blocks

    def start(self, sequence: Sequence) -> None:
        """A waiting prompt got a chunk that does not end it."""
        self._num_blocks += self._pool.blocks_for(sequence.num_known)

    def end(self, sequence: Sequence) -> None:
        """A running prompt got its last chunk."""
        self._num_blocks -= self._pool.blocks_for(sequence.num_known)
