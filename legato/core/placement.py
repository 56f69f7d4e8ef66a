"""Gives the prompts of one step their chunks, and waiting prompts the room for their blocks."""

from bisect import bisect_left

from legato.core.admission import Admission, PartialPrompts
from legato.core.budget import Allowance
from legato.core.lifecycle import Status
from legato.core.prefix_index import Digest
from legato.core.prompt_order import PromptOrder
from legato.core.request import RequestId
from legato.core.schedule import Chunk, Reason
from legato.core.sequence import Sequence
from legato.core.state import SchedulerState


class Placement:
    """The chunks of a step, and what they leave of its allowance. It reads the state and changes only
    itself."""

    def __init__(
        self,
        state: SchedulerState,
        order: PromptOrder,
        allowance: Allowance,
        *,
        running: list[Sequence],
        started: list[Sequence],
        num_decodes: int,
    ) -> None:
        """`running` are the sequences that keep their blocks: `started` prompts and `num_decodes` decodes."""
        self.allowance = allowance
        self.chunks: list[Chunk] = []
        self.admitted: list[RequestId] = []
        self._state = state
        self._order = order
        self._num_running = len(running)
        self._num_decodes = num_decodes
        waiting = len(order.prompts) > len(started)
        self._admission = Admission(state, running) if waiting else None
        self._partial = PartialPrompts(state.pool, started)
        self._leaders: dict[Digest, tuple[Sequence, Chunk]] = {}
        """The digest of the block that a chunk starts in -> the sequence that computes it, and the chunk."""

    def start_of(self, prompt: Sequence) -> int:
        """The position where the next chunk of a prompt begins."""
        if prompt.status is Status.RUNNING:
            return prompt.num_computed
        return len(self._state.find_prefix(prompt)) * self._state.pool.block_size

    def is_blocked(self, prompt: Sequence) -> bool:
        """Whether a prompt is behind a waiting one that it must not overtake."""
        barrier = self._order.behind.get(prompt.id)
        return barrier is not None and barrier not in self.admitted

    def place(self, prompt: Sequence) -> Chunk | Reason:
        """Give a prompt a chunk. Returns the chunk, or the reason why the prompt gets none."""
        if self.allowance.left(0) < 1:
            return Reason.BUDGET
        if prompt.status is Status.RUNNING:
            return self._place_started(prompt)
        return self._place_waiting(prompt)

    def _place_started(self, prompt: Sequence) -> Chunk | Reason:
        length = self._chunk_len(prompt, prompt.num_computed)
        if isinstance(length, Reason):
            return length
        chunk = self._add_chunk(prompt, prompt.num_computed, length)
        if chunk.is_last:
            self._partial.end(prompt)
        return chunk

    def _place_waiting(self, prompt: Sequence) -> Chunk | Reason:
        if self._num_running + len(self.admitted) >= self._state.config.max_running:
            return Reason.MAX_RUNNING
        if self.is_blocked(prompt):
            return Reason.BLOCKS
        assert self._admission is not None
        found = self._admission.find_room(prompt)
        if found is None:
            return Reason.BLOCKS
        if self._is_sooner_as_follower(prompt, len(found)):
            return Reason.PREFIX
        start = len(found) * self._state.pool.block_size
        length = self._chunk_len(prompt, start)
        if isinstance(length, Reason):
            return length
        is_last = start + length == prompt.num_known
        if not is_last and not self._partial.has_room(prompt):
            return Reason.PARTIAL
        if not is_last:
            self._partial.start(prompt)
        chunk = self._add_chunk(prompt, start, length)
        self._admission.admit(prompt, found)
        self.admitted.append(prompt.id)
        return chunk

    def _chunk_len(self, prompt: Sequence, start: int) -> int | Reason:
        """Ask the prefill policy for a length, and limit its answer.

        A chunk never goes past the end of the sequence or over the budget, and an empty step gets at least
        one token. The only exception to the budget is a whole prompt in a step of its own
        (`PrefillPolicy.whole`).
        """
        policy, config = self._state.prefill_policy, self._state.config
        alone = not self._num_decodes and not self.chunks
        scored = prompt.num_unscored > 0
        remaining, left = prompt.num_known - start, self.allowance.left(start, scored=scored)
        length = policy.chunk_len(remaining, left, alone)
        if alone:
            length = max(length, 1)
        length = min(length, remaining if policy.whole and alone else min(remaining, left))
        if length < 1:
            return Reason.POLICY if left else Reason.MIN_CHUNK
        if length < remaining and self.chunks:
            is_cut = length == left and length < self.allowance.shortest(
                start, config.min_chunk, scored=scored
            )
            if is_cut:
                return Reason.MIN_CHUNK
        return length

    def _add_chunk(self, prompt: Sequence, start: int, length: int) -> Chunk:
        end = start + length
        num_scored = len(prompt.scored_positions(start, end))
        chunk = Chunk(prompt.id, start, length, end == prompt.num_known, num_scored)
        self.chunks.append(chunk)
        self.allowance.take(start, length, num_scored)
        block = start // self._state.pool.block_size
        if block + 1 < len(prompt.chain):  # Only full blocks have a digest.
            self._leaders[prompt.chain[block + 1]] = prompt, chunk
        return chunk

    def _is_sooner_as_follower(self, prompt: Sequence, num_found: int) -> bool:
        """Whether a prompt should wait for a prefix that another sequence, its leader, computes in this step.

        It should if the leader, at its present chunk size, needs no more steps to the end of the common
        prefix than the prompt would need by itself, with the chunk that it could get now.
        """
        wanted = self._state.shareable(prompt)[num_found:]
        if not wanted or wanted[0] not in self._leaders:
            return False
        leader, chunk = self._leaders[wanted[0]]
        theirs = leader.chain[num_found + 1 :]
        shorter = range(min(len(wanted), len(theirs)))
        # Chains are equal up to the end of the common prefix and differ from there on.
        num_blocks = bisect_left(shorter, True, key=lambda i: wanted[i] != theirs[i])
        block_size = self._state.pool.block_size
        num_common, start = num_blocks * block_size, num_found * block_size
        end = start + num_common
        own_chunk = self._state.prefill_policy.chunk_len(num_common, self.allowance.left(start), False)
        return own_chunk < 1 or (end - chunk.start) / chunk.length <= num_common / own_chunk
