"""The scheduler: which sequences run in the next step, and with how many tokens.

There is no prefill phase and no decode phase. Each running sequence has known and computed tokens, and a step
lets computed catch up with known, under one budget: decodes first, then prompts, started and waiting alike.

    schedule(now) -> Schedule    decides; changes nothing
    commit(schedule)             takes and gives back blocks, moves sequences
    plan(scheduler, schedule)    (core.plan) the integers for the runner
    complete(result, now) -> events   appends tokens, ends what is done, frees its blocks

What may enter this file: where sequences are and who holds blocks. Who comes first belongs to `order`, who
may come in to `admission`, who loses its blocks to `preemption`, how long a chunk is to `budget`, `prefill`
and `draft`, when a reply ends to `stopping`. Time is an argument.
"""

import heapq
from dataclasses import dataclass
from itertools import accumulate

from legato.core.admission import MAX_PREEMPTIONS
from legato.core.block_pool import BlockPool
from legato.core.budget import Budget, FixedBudget
from legato.core.draft import Draft
from legato.core.entry import check_request
from legato.core.events import Event, FinishEvent, PromptEvent, TokenEvent
from legato.core.lifecycle import Move, Status
from legato.core.order import Fair, Order
from legato.core.plan import StepResult
from legato.core.prefill import FillBudget, PrefillPolicy
from legato.core.prefix_index import Digest, extend, private_root, shared_root
from legato.core.queue import Queue
from legato.core.replies import ReplyLengths
from legato.core.request import Request, RequestId
from legato.core.schedule import Reason, Schedule
from legato.core.sequence import Sequence
from legato.core.stopping import FinishReason, finish_reason
from legato.errors import ConfigError, RequestError

AGEING = 1 / 64
"""Share of the budget by which virtual time advances in every step, at least."""
CALM = 0.97
"""What is left of the caution after a preemption, step by step: half of it after 23 steps."""
ITS_TURN = (Reason.BLOCKS, Reason.MAX_RUNNING, Reason.PARTIAL, Reason.POLICY)
"""Reasons that others take away from whom they overtake: without a bound it might wait for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of a step and of a sequence."""

    max_batch_tokens: int
    """The token budget: the most tokens in one step."""
    max_running: int
    """The most sequences that hold blocks. At most the budget, so that every decode fits in every step."""
    max_model_len: int
    """The most tokens of a prompt and its reply together."""
    vocab_size: int
    """Token ids run from 0 to vocab_size - 1."""
    min_chunk: int = 1
    """A step's later chunks are not cut shorter by the budget than this; the first takes what there is."""
    prefix_cache: bool = True
    """Whether requests share computed blocks. Without, each shares only with itself, after a preemption."""
    strict: bool = False
    """Admit by the most that a request may ask for, so that nothing is ever preempted."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running", "max_model_len", "vocab_size", "min_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        if self.max_running > self.max_batch_tokens:
            raise ConfigError(
                f"max_running ({self.max_running}) is above max_batch_tokens ({self.max_batch_tokens}): "
                "the decodes of all running sequences must fit in one step",
                param="max_running",
            )


class Scheduler:
    """Not thread-safe, and without a will of its own: the same calls give the same answers."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockPool,
        *,
        prefill_policy: PrefillPolicy | None = None,
        budget: Budget | None = None,
        order: Order | None = None,
        replies: ReplyLengths | None = None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.prefill_policy = prefill_policy or FillBudget()
        self.budget = budget or FixedBudget(config.max_batch_tokens)
        self.order = order or Fair()
        self.replies = replies or ReplyLengths()
        self.step = 0  # how many were committed
        self.waiting = Queue(self.order)
        self.running: dict[RequestId, Sequence] = {}
        """Sequences that hold blocks, in the order in which they were admitted."""
        self.num_left_waiting = 0
        """How many the last step left in the queue: those that came since have not been looked at."""
        self.virtual_time = 0.0
        """Tokens that every prompt would have got by now if all had shared every step equally; see `Fair`."""
        self.caution = 0.0
        """0: admit by expected need. 1: by full need, as right after a preemption."""
        self._num_added = 0
        self._deadlines: list[tuple[float, int, RequestId]] = []
        """A heap; requests that ended leave it when their time comes, or when they are too many."""
        self._in_flight: Schedule | None = None
        self._held: list[list[int]] = []

    # -- queries: none of them changes anything --------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def in_flight(self) -> Schedule | None:
        """The schedule that was committed and is not complete."""
        return self._in_flight

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """Blocks of sequences aborted while the step in flight still writes to them."""
        return tuple(block for blocks in self._held for block in blocks)

    def sequence(self, request_id: RequestId) -> Sequence:
        """The living sequence of a request; raises KeyError if there is none."""
        return self.running.get(request_id) or self.waiting[request_id]

    def shareable(self, sequence: Sequence) -> list[Digest]:
        """The digests of the blocks that a sequence may take from the cache, in order.

        Never the one with its last known token: so no block that others may read is ever written.
        """
        return sequence.chain[1 : sequence.num_cacheable // self.blocks.block_size + 1]

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The blocks of a waiting sequence that are computed already."""
        return self.blocks.find(self.shareable(sequence))

    def tokens_ahead(self) -> dict[RequestId, int]:
        """Of each prompt, the tokens to compute until its first token: its own, and those that go first.

        What will be found in the cache, and waits for blocks, are not foreseen.
        """
        prompts = [(self.order.key(s), s, s.remaining) for s in self.running.values() if not s.num_generated]
        prompts += [(key, s, s.size) for key, s in self.waiting.head(len(self.waiting))]
        prompts.sort()
        return dict(zip([s.id for _, s, _ in prompts], accumulate(num for _, _, num in prompts), strict=True))

    def explain(self, schedule: Schedule) -> dict[RequestId, Reason]:
        """Why each sequence that a schedule leaves out is left out. Call it before the commit."""
        reasons = dict(schedule.left_out)
        if schedule.queue is not None:
            others = (i for i in self.waiting if i not in schedule.admitted and i not in reasons)
            reasons |= dict.fromkeys(others, schedule.queue)
        return reasons

    # -- requests in and out ---------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Refuse what can never be served, with the numbers.

        Raises `ContextLengthError` if it can never fit, `RequestError` for an empty prompt or an id that is
        no token. It reads only what never changes, so any thread may call it.
        """
        check_request(request, self.config, self.blocks)

    def add(self, request: Request) -> None:
        """Put a request in the queue. Raises as `validate` does, and for an id in use."""
        self.validate(request)
        if request.id in self.running or request.id in self.waiting:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        root = shared_root(request.cache_salt) if self.config.prefix_cache else private_root(self._num_added)
        sequence = Sequence(
            request,
            number=self._num_added,
            chain=[root],
            guaranteed=self.config.strict,
            entry_step=self.step,
            entry_time=self.virtual_time,
        )
        extend(sequence.chain, sequence.tokens, self.blocks.block_size)
        sequence.size = sequence.num_known - len(self.find_prefix(sequence)) * self.blocks.block_size
        self.waiting.enter(sequence)
        self._num_added += 1
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.number, request.id))
            self._forget_deadlines()

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> tuple[Event, ...]:
        """End a request from outside, in whatever state it is. An unknown id is no error: it just ended."""
        sequence = self.running.get(request_id) or self.waiting.get(request_id)
        if sequence is None:
            return ()
        self._end(sequence, Move.ABORT, reason)
        return (FinishEvent(request_id, reason),)

    def expire(self, now: float) -> tuple[FinishEvent, ...]:
        """End every request whose deadline has passed, waiting or running."""
        events: list[FinishEvent] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            if (sequence := self._due(heapq.heappop(self._deadlines))) is not None:
                self._end(sequence, Move.ABORT, FinishReason.TIMEOUT)
                events.append(FinishEvent(sequence.id, FinishReason.TIMEOUT))
        return tuple(events)

    # -- the step --------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Schedule:
        """Decide the next step. `now` is in seconds on the engine's clock."""
        draft = Draft(self)
        draft.preempt()
        draft.place_decodes()
        draft.place_prompts()
        return draft.schedule(self.step, now)

    def commit(self, schedule: Schedule) -> None:
        """Make a schedule so. It must come from this very state, with no step in flight."""
        if self._in_flight is not None or schedule.step != self.step:
            raise RuntimeError(f"schedule {schedule.step} is not the next step ({self.step})")
        for request_id in schedule.preempted:
            self._preempt(self.running[request_id])
        self._note_overtaken(schedule)
        starts = {chunk.request_id: chunk.start for chunk in schedule.chunks}
        for request_id in schedule.admitted:  # all of them first: no block that one shares may be evicted
            self._admit(request_id, starts[request_id])
        size = self.blocks.block_size
        for request_id, *_ in schedule.runs:
            sequence = self.running[request_id]
            if len(sequence.tokens) > len(sequence.blocks) * size:
                self._grow(sequence)
        for chunk in schedule.chunks:
            self.running[chunk.request_id].last_step = self.step
        self._advance_virtual_time(schedule)
        self.num_left_waiting = len(self.waiting)
        self.caution = 1.0 if schedule.preempted else self.caution * CALM
        self._in_flight = schedule
        self.step += 1

    def complete(self, result: StepResult, now: float) -> tuple[Event, ...]:
        """Absorb what the committed step computed by `now`, in the order of its runs.

        Sequences that were aborted meanwhile are skipped, their sampled tokens dropped.
        """
        schedule = self._land()
        self.budget.note(schedule.shape, now - schedule.now)
        sampled, size = iter(result.sampled), self.blocks.block_size
        events: list[Event] = []
        for request_id, start, length, last, _ in schedule.runs:
            token = next(sampled) if last else None
            sequence = self.running.get(request_id)
            if sequence is None:
                continue
            sequence.num_computed = end = start + length
            if end // size > start // size:
                self._publish(sequence, start)
            if request_id in result.scored:
                scored = result.scored[request_id]
                sequence.num_unscored -= len(scored)
                events.append(PromptEvent(request_id, scored))
            if token is None:
                continue
            if token.fault is not None:
                self._end(sequence, Move.FAIL, token.fault.reason)
                events.append(FinishEvent(request_id, *token.fault))
                continue
            if not sequence.request.params.max_tokens:  # its prompt was scored, the draw is dropped
                self._end(sequence, Move.FINISH, FinishReason.LENGTH)
                events.append(FinishEvent(request_id, FinishReason.LENGTH))
                continue
            sequence.tokens.append(token.token)
            reason = finish_reason(sequence)
            if reason is not None:
                self._end(sequence, Move.FINISH, reason)
            events.append(TokenEvent(request_id, token, reason, sequence.num_cached))
        return tuple(events)

    def fail(self, message: str) -> tuple[Event, ...]:
        """The committed step failed: end every sequence that was in it. The others stay as they are."""
        living = [s for run in self._land().runs if (s := self.running.get(run.request_id)) is not None]
        for sequence in living:
            self._end(sequence, Move.FAIL, FinishReason.ERROR)
        return tuple(FinishEvent(sequence.id, FinishReason.ERROR, message) for sequence in living)

    # -- the only places where blocks and states change --------------------------------------------------

    def _land(self) -> Schedule:
        """Take the step out of flight, and free what waited for it."""
        schedule, self._in_flight = self._in_flight, None
        if schedule is None:
            raise RuntimeError("no step is in flight")
        for blocks in self._held:
            self.blocks.release(blocks)
        self._held = []
        return schedule

    def _forget_deadlines(self) -> None:
        """Those of requests that ended, when they are more than the others."""
        if len(self._deadlines) > 2 * (len(self.running) + len(self.waiting)) + 64:
            self._deadlines = [entry for entry in self._deadlines if self._due(entry) is not None]
            heapq.heapify(self._deadlines)

    def _due(self, deadline: tuple[float, int, RequestId]) -> Sequence | None:
        """Whose deadline it is; None if it ended, even if another one has its id now."""
        sequence = self.running.get(deadline[2]) or self.waiting.get(deadline[2])
        return sequence if sequence is not None and sequence.number == deadline[1] else None

    def _admit(self, request_id: RequestId, start: int) -> None:
        """Out of the queue, with the blocks of its first `start` tokens, which are computed already."""
        sequence = self.waiting.leave(request_id)
        if not sequence.num_preemptions:
            sequence.num_cached = start
        sequence.blocks = self.find_prefix(sequence)[: start // self.blocks.block_size]
        self.blocks.share(sequence.blocks)
        sequence.num_computed = start
        sequence.last_step = self.step
        sequence.move(Move.ADMIT)
        self.running[request_id] = sequence

    def _advance_virtual_time(self, schedule: Schedule) -> None:
        """By an equal share of the step's prompt tokens, or a little where so many wait that it is less."""
        left_out = sum(1 for request_id, _ in schedule.left_out if request_id in self.running)
        num_prompts = len(schedule.chunks) + left_out + len(self.waiting)
        share = schedule.num_prefill_tokens / max(num_prompts, 1)
        self.virtual_time += max(share, AGEING * schedule.budget)

    def _note_overtaken(self, schedule: Schedule) -> None:
        """Count how often the first of the queue is overtaken though its turn has come."""
        if schedule.admitted:
            [(_, first)] = self.waiting.head(1)
            reason = schedule.reasons.get(first.id, schedule.queue)
            if first.id not in schedule.admitted and reason in ITS_TURN:
                first.num_overtaken += len(schedule.admitted)

    def _publish(self, sequence: Sequence, start: int) -> None:
        """The blocks that a run filled, the first of them from position `start` on, may be shared now."""
        size = self.blocks.block_size
        end = sequence.num_computed // size
        extend(sequence.chain, sequence.tokens[: end * size], size)
        for i in range(start // size, end):
            self.blocks.publish(sequence.blocks[i], sequence.chain[i + 1])

    def _grow(self, sequence: Sequence) -> None:
        """Give a running sequence blocks for all its known tokens."""
        missing = self.blocks.blocks_for(sequence.num_known) - len(sequence.blocks)
        taken = self.blocks.try_take(missing)
        if taken is None:
            raise RuntimeError(f"the schedule promised {missing} blocks, {self.blocks.num_free} are free")
        sequence.blocks.extend(taken)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue. The tokens stay; what is computed stays known until its blocks are taken."""
        self._release(sequence)
        sequence.move(Move.PREEMPT)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        sequence.guaranteed = sequence.guaranteed or sequence.num_preemptions >= MAX_PREEMPTIONS
        self.waiting.enter(sequence)

    def _end(self, sequence: Sequence, move: Move, reason: FinishReason) -> None:
        """The one way out, for a finish, an abort and an error."""
        if sequence.status is Status.RUNNING:
            self._release(sequence)
        else:
            self.waiting.leave(sequence.id)
        sequence.move(move)
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and sequence.num_generated:
            self.replies.note(sequence.num_generated)

    def _release(self, sequence: Sequence) -> None:
        """A sequence leaves `running` and gives up its blocks, unless a step in flight still writes them."""
        del self.running[sequence.id]
        blocks, sequence.blocks = sequence.blocks, []
        runs = () if self._in_flight is None else self._in_flight.runs
        if any(run.request_id == sequence.id for run in runs):
            self._held.append(blocks)
        else:
            self.blocks.release(blocks)
