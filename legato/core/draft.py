"""One step being decided: the arithmetic of `Scheduler.schedule`, on numbers of its own.

A draft reads the scheduler and changes only itself: who is preempted, the tokens left in the budget, the room
left for newcomers, and the reasons of those left out.
"""

from bisect import bisect_left
from typing import TYPE_CHECKING

from legato.core.admission import Admission
from legato.core.budget import Allowance, Limit
from legato.core.lifecycle import Status
from legato.core.order import Key
from legato.core.preemption import choose_victims
from legato.core.prefix_index import Digest
from legato.core.request import RequestId
from legato.core.schedule import Chunk, Reason, Schedule
from legato.core.sequence import Sequence

if TYPE_CHECKING:
    from legato.core.scheduler import Scheduler

MAX_LOOKED_AT, MAX_REFUSED = 64, 8
"""How many waiting sequences a step looks at, and after how many that cannot start it gives up: what is
further back waits for its turn."""
MAX_OVERTAKEN = 32
"""Times that the first of the queue is overtaken while it finds no blocks, no place or no step for itself."""
OVERDUE_STEPS = 16
"""A started prompt that got nothing for so many steps goes first, whatever the order says."""
PARTIAL_SHARE = 0.5
"""Share of the pool that prompts computed in part may hold together."""


class Draft:
    """Call `preempt`, `place_decodes`, `place_prompts` once each, in this order, then `schedule`."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._pool = scheduler.blocks
        self._running = list(scheduler.running.values())
        self._allowance = Allowance(Limit.TOKENS, 0)
        self._size = 0
        """Tokens that the step may hold, once its decodes are known."""
        self._started: list[Sequence] = []
        """Running prompts: those with more than one token to compute."""
        self._decodes: list[Chunk] = []
        self._chunks: list[Chunk] = []
        self._admitted: list[RequestId] = []
        self._preempted: list[RequestId] = []
        self._left_out: dict[RequestId, Reason] = {}
        self._num_refused = 0
        self._closed: Reason | None = None
        """Why nobody further is taken from the queue in this step."""
        self._admission: Admission | None = None
        self._behind: dict[RequestId, RequestId] = {}
        """Waiting sequence -> the one before it that it must not overtake."""
        self._partial_blocks = 0
        """Blocks held by prompts that this step does not end."""
        self._leaders: dict[Digest, tuple[Sequence, Chunk]] = {}
        """By the digest of the block that a chunk works on: the chunk, and whose it is."""

    def preempt(self) -> None:
        """Where the decodes need more blocks than there are, some sequences give theirs up."""
        self._preempted = [victim.id for victim in choose_victims(self._running, self._pool)]
        if self._preempted:
            self._left_out = dict.fromkeys(self._preempted, Reason.PREEMPTED)
            self._running = [s for s in self._running if s.id not in self._left_out]

    def place_decodes(self) -> None:
        """Every one: `preempt` made the room, and the budget holds all that may run."""
        decodes: list[Sequence] = []
        for sequence in self._running:
            if len(sequence.tokens) - sequence.num_computed == 1:
                decodes.append(sequence)
                self._decodes.append(Chunk(sequence.request.id, sequence.num_computed, 1, True))
            else:
                self._started.append(sequence)
        self._allowance = self._scheduler.budget.allow(decodes)
        self._size = len(decodes) + self._allowance.left(0)

    def place_prompts(self) -> None:
        """Started and waiting prompts in one order: first those that end within the share kept for them, then
        all others with what is left."""
        self._partial_blocks = sum(len(s.blocks) for s in self._started)
        prompts = self._in_order(self._candidates())
        settled = self._place_ending(prompts)
        self._num_refused = 0
        for prompt in prompts:
            if prompt.id not in settled:
                self._settle(prompt)
            if self._num_refused == MAX_REFUSED:
                self._closed = self._closed or Reason.TURN
            if self._closed is not None and not self._started:
                break  # nobody is asked any more

    def schedule(self, step: int, now: float) -> Schedule:
        waiting = self._scheduler.waiting
        num_named = sum(1 for request_id in self._left_out if request_id in waiting)
        others = len(waiting) - len(self._admitted) - num_named
        return Schedule(
            step=step,
            now=now,
            decodes=tuple(self._decodes),
            chunks=tuple(self._chunks),
            admitted=tuple(self._admitted),
            preempted=tuple(self._preempted),
            left_out=tuple(self._left_out.items()),
            queue=(self._closed or Reason.TURN) if others else None,
            num_behind=others,
            budget=self._size,
            limit=self._allowance.limit,
            target=self._allowance.target,
            margin=self._allowance.margin,
            cost=self._allowance.cost,
        )

    def _candidates(self) -> list[tuple[Key, Sequence]]:
        """The head of the queue, with keys: those that may be admitted in this step."""
        if self._preempted:
            self._closed = Reason.PREEMPTION
        elif len(self._running) >= self._scheduler.config.max_running:
            self._closed = Reason.MAX_RUNNING
        elif self._scheduler.waiting:
            self._admission = Admission(self._scheduler, self._running)
            return self._scheduler.waiting.head(MAX_LOOKED_AT)
        return []

    def _in_order(self, waiting: list[tuple[Key, Sequence]]) -> list[Sequence]:
        """All prompts of the step; overdue ones first, then by the order."""
        barrier: RequestId | None = None
        for _, candidate in waiting:
            if barrier is not None:
                self._behind[candidate.id] = barrier
            if candidate.num_preemptions or candidate.num_overtaken >= MAX_OVERTAKEN:
                barrier = candidate.id
        if not self._started:
            return [candidate for _, candidate in waiting]
        step, order = self._scheduler.step, self._scheduler.order
        places = [(step - s.last_step <= OVERDUE_STEPS, order.key(s), s) for s in self._started]
        places += [(True, key, candidate) for key, candidate in waiting]
        return [sequence for _, _, sequence in sorted(places)]

    def _place_ending(self, prompts: list[Sequence]) -> set[RequestId]:
        """Settle those that end within the share kept for them; who they were."""
        settled: set[RequestId] = set()
        if self._scheduler.prefill_policy.whole:
            return settled  # all end in their step: short ones would leave less than the first one needs
        part = self._scheduler.order.ending_share if prompts else 0.0
        if not part:
            return settled
        first = self._start(prompts[0])  # who gets on, whatever the others take
        kept = self._allowance.share(part, first, self._scheduler.config.min_chunk)
        for prompt in prompts:
            if kept.left(0) < 1 or self._num_refused == MAX_REFUSED:
                break
            if self._is_open(prompt) and not self._is_barred(prompt) and self._ends_within(prompt, kept):
                settled.add(prompt.id)
                if self._settle(prompt):
                    kept.take(self._chunks[-1].start, self._chunks[-1].length, self._chunks[-1].num_scored)
        return settled

    def _start(self, prompt: Sequence) -> int:
        """Where its next chunk begins."""
        if prompt.status is Status.RUNNING:
            return prompt.num_computed
        return len(self._scheduler.find_prefix(prompt)) * self._pool.block_size

    def _is_open(self, prompt: Sequence) -> bool:
        """Whether a prompt is still asked: those that wait only until the queue is closed."""
        return self._closed is None or prompt.status is Status.RUNNING

    def _is_barred(self, prompt: Sequence) -> bool:
        return prompt.id in self._behind and self._behind[prompt.id] not in self._admitted

    def _ends_within(self, prompt: Sequence, kept: Allowance) -> bool:
        """Whether a chunk that keeps to an allowance ends a prompt."""
        if prompt.status is not Status.RUNNING:
            last = -(-(prompt.num_known - kept.left(0)) // self._pool.block_size)
            if last > 0 and not self._pool.find(prompt.chain[last : last + 1]):
                return False  # as with most: one look-up of a block that must be computed, in place of all
        start = self._start(prompt)
        remaining, left = prompt.num_known - start, kept.left(start, scored=prompt.num_unscored > 0)
        return remaining <= min(self._scheduler.prefill_policy.chunk_len(remaining, left, False), left)

    def _settle(self, prompt: Sequence) -> bool:
        """Place a prompt, or note why it is left out. Nothing is noted of those behind the end of the queue's
        part that this step looks at: `Schedule.queue` says it for all of them."""
        if not self._is_open(prompt):
            return False
        reason = self._try_place(prompt)
        if reason is not None:
            self._left_out[prompt.id] = reason
            waits = prompt.status is not Status.RUNNING
            self._num_refused += waits and reason is not Reason.PREFIX  # followers hold nobody up
        return reason is None

    def _try_place(self, prompt: Sequence) -> Reason | None:
        """Give a prompt a chunk, and if it waits its blocks; or say why not."""
        if self._allowance.left(0) < 1:
            self._closed = Reason.BUDGET
            return self._closed
        if prompt.status is Status.RUNNING:
            return self._try_chunk(prompt, prompt.num_computed)
        assert self._admission is not None
        if len(self._running) + len(self._admitted) >= self._scheduler.config.max_running:
            self._closed = Reason.MAX_RUNNING
            return self._closed
        if self._is_barred(prompt):
            return Reason.BLOCKS
        found = self._admission.try_find(prompt)
        if found is None:
            return Reason.BLOCKS
        if self._is_sooner_as_follower(prompt, len(found)):
            return Reason.PREFIX
        reason = self._try_chunk(prompt, len(found) * self._pool.block_size)
        if reason is None:
            self._admission.admit(prompt, found)
            self._admitted.append(prompt.id)
        return reason

    def _try_chunk(self, prompt: Sequence, start: int) -> Reason | None:
        """Ask the prefill policy for a chunk and hold its answer to the law.

        Never past the sequence's end, never over the budget, and never nothing in an empty step. The one
        exception to the budget is a whole prompt in a step of its own (`PrefillPolicy.whole`).
        """
        policy, config = self._scheduler.prefill_policy, self._scheduler.config
        alone = not self._decodes and not self._chunks
        scored = prompt.num_unscored > 0
        remaining, left = prompt.num_known - start, self._allowance.left(start, scored=scored)
        length = policy.chunk_len(remaining, left, alone)
        limit = remaining if policy.whole and alone else min(remaining, left)
        length = min(max(length, int(alone)), limit)
        if length < 1:
            return Reason.POLICY if left else Reason.MIN_CHUNK
        last = length == remaining
        cut = length == left and length < self._allowance.shortest(start, config.min_chunk, scored=scored)
        if cut and not last and self._chunks:
            return Reason.MIN_CHUNK
        waits = prompt.status is not Status.RUNNING
        if waits and not last and self._is_over_partial_cap(prompt):
            return Reason.PARTIAL
        self._partial_blocks += self._pool.blocks_for(prompt.num_known) * (waits - last)
        chunk = Chunk(prompt.id, start, length, last, len(prompt.scored(start, start + length)))
        self._chunks.append(chunk)
        self._allowance.take(start, length, chunk.num_scored)
        for digest in prompt.chain[start // self._pool.block_size + 1 :][:1]:
            self._leaders[digest] = prompt, chunk
        return None

    def _is_over_partial_cap(self, prompt: Sequence) -> bool:
        blocks = self._partial_blocks + self._pool.blocks_for(prompt.num_known)
        return self._partial_blocks > 0 and blocks > PARTIAL_SHARE * self._pool.num_blocks

    def _is_sooner_as_follower(self, prompt: Sequence, num_found: int) -> bool:
        """Whether to wait for a prefix that another sequence computes in this very step.

        It is sooner if the leader, at its present pace, needs no more steps to the end of what both have in
        common than the prompt would need by itself, with the chunk that it could get now.
        """
        wanted = self._scheduler.shareable(prompt)[num_found:]
        if not wanted or wanted[0] not in self._leaders:
            return False
        leader, chunk = self._leaders[wanted[0]]
        theirs = leader.chain[num_found + 1 :]
        shorter = range(min(len(wanted), len(theirs)))
        common = bisect_left(shorter, True, key=lambda i: wanted[i] != theirs[i])  # equal up to there
        num_common = common * self._pool.block_size
        start = num_found * self._pool.block_size
        own_chunk = self._scheduler.prefill_policy.chunk_len(num_common, self._allowance.left(start), False)
        end = start + num_common
        return own_chunk < 1 or (end - chunk.start) / chunk.length <= num_common / own_chunk
