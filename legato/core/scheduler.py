"""The scheduler: which sequences run in the next step, and with how many tokens.

There is no prefill phase and no decode phase. Each running sequence has known tokens and computed tokens,
and each step lets the computed tokens catch up, within one token budget. Decodes come first, then prompts,
started and waiting alike.

    schedule(now) -> Schedule         decides and changes nothing
    commit(schedule)                  takes and releases blocks, moves sequences between queue and running
    plan(state, schedule)             (core.plan) builds the integers for the runner
    complete(result, now) -> events   appends tokens, ends sequences, releases their blocks

This file only moves sequences and blocks. The decision is in `decision` and the modules it uses. Time is an
argument.
"""

from legato.core.admission import MAX_PREEMPTIONS
from legato.core.block_pool import BlockPool
from legato.core.budget import Budget, FixedBudget
from legato.core.deadlines import Deadlines
from legato.core.decision import decide
from legato.core.events import Event, FinishEvent, PromptEvent, TokenEvent
from legato.core.lifecycle import FinishReason, Status, Transition
from legato.core.output_lengths import OutputLengthEstimator
from legato.core.prefill_policy import FillBudget, PrefillPolicy
from legato.core.prefix_index import extend, private_root, shared_root
from legato.core.request import Request, RequestId
from legato.core.schedule import Reason, Schedule
from legato.core.scheduling_policy import Fair, SchedulingPolicy
from legato.core.sequence import Sequence
from legato.core.state import SchedulerConfig, SchedulerState
from legato.core.step_plan import SamplingFailure, StepResult
from legato.core.stopping import finish_reason
from legato.core.validation import validate_request
from legato.core.waiting_queue import WaitingQueue
from legato.errors import RequestError

MIN_VIRTUAL_TIME_SHARE = 1 / 64
"""Virtual time advances in every step by at least this share of the token budget."""
CAUTION_DECAY = 0.97
"""`caution` is multiplied by this after every step without a preemption. It halves in 23 steps."""
OVERTAKEN_REASONS = (Reason.BLOCKS, Reason.MAX_RUNNING, Reason.PARTIAL, Reason.POLICY)
"""A sequence that waits for these reasons could wait forever if others overtook it without limit."""


class Scheduler:
    """Not thread-safe. Deterministic: the same calls give the same answers."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        *,
        prefill_policy: PrefillPolicy | None = None,
        budget: Budget | None = None,
        policy: SchedulingPolicy | None = None,
        output_lengths: OutputLengthEstimator | None = None,
    ) -> None:
        policy = policy or Fair()
        self.state = SchedulerState(
            config=config,
            pool=pool,
            prefill_policy=prefill_policy or FillBudget(),
            budget=budget or FixedBudget(config.max_batch_tokens),
            policy=policy,
            output_lengths=output_lengths or OutputLengthEstimator(),
            waiting=WaitingQueue(policy),
        )
        """Read-only for everyone else."""
        self._num_arrivals = 0
        self._deadlines = Deadlines()

    # -- requests ----------------------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Refuse a request that can never be served.

        Raises `ContextLengthError`, with the numbers, if it can never fit, and `RequestError` for an empty
        prompt or a token id that is not in the vocabulary. Only reads what never changes, so any thread may
        call it.
        """
        validate_request(request, self.state.config, self.state.pool)

    def add(self, request: Request) -> None:
        """Put a request into the queue. Raises as `validate` does, and `RequestError` for an id in use."""
        self.validate(request)
        state = self.state
        if request.id in state.running or request.id in state.waiting:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        shared = state.config.prefix_cache
        sequence = Sequence(
            request,
            arrival_index=self._num_arrivals,
            chain=[shared_root(request.cache_salt) if shared else private_root(self._num_arrivals)],
            guaranteed=state.config.strict,
            arrival_step=state.step,
            arrival_virtual_time=state.virtual_time,
        )
        extend(sequence.chain, sequence.tokens, state.pool.block_size)
        num_cached = len(state.find_prefix(sequence)) * state.pool.block_size
        sequence.num_uncached_at_arrival = sequence.num_known - num_cached
        state.waiting.add(sequence)
        self._num_arrivals += 1
        if request.deadline is not None:
            self._deadlines.add((request.deadline, sequence.arrival_index, request.id))
            num_alive = len(state.running) + len(state.waiting)
            self._deadlines.compact(num_alive, lambda entry: self._alive(*entry[1:]) is not None)

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> tuple[Event, ...]:
        """End a request in any state. An unknown id is not an error: the request may just have ended."""
        sequence = self.state.get(request_id)
        if sequence is None:
            return ()
        self._end(sequence, Transition.ABORT, reason)
        return (FinishEvent(request_id, reason),)

    def expire(self, now: float) -> tuple[FinishEvent, ...]:
        """End every request whose deadline has passed, in any state."""
        events: list[FinishEvent] = []
        for _, arrival_index, request_id in self._deadlines.pop_passed(now):
            sequence = self._alive(arrival_index, request_id)
            if sequence is not None:
                self._end(sequence, Transition.ABORT, FinishReason.TIMEOUT)
                events.append(FinishEvent(request_id, FinishReason.TIMEOUT))
        return tuple(events)

    # -- the step ----------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Schedule:
        """Decide the next step. `now` is in seconds on the engine's clock."""
        return decide(self.state, now)

    def commit(self, schedule: Schedule) -> None:
        """Apply a schedule. It must be made from the present state, and no step may be in flight."""
        state = self.state
        if state.in_flight is not None or schedule.step != state.step:
            raise RuntimeError(f"schedule {schedule.step} is not the next step ({state.step})")
        for request_id in schedule.preempted:
            self._preempt(state.running[request_id])
        self._count_overtaken(schedule)
        starts = {chunk.request_id: chunk.start for chunk in schedule.chunks}
        # Admit all before any block is taken: that could evict a block which an admitted sequence shares.
        for request_id in schedule.admitted:
            self._admit(request_id, starts[request_id])
        block_size = state.pool.block_size
        for request_id, *_ in schedule.runs:
            sequence = state.running[request_id]
            # This is `needs_block` written out: the loop visits every running sequence in every step.
            if len(sequence.tokens) > len(sequence.block_table) * block_size:
                self._grow(sequence)
        for chunk in schedule.chunks:
            state.running[chunk.request_id].last_step = state.step
        self._advance_virtual_time(schedule)
        state.num_left_waiting = len(state.waiting)
        state.caution = 1.0 if schedule.preempted else state.caution * CAUTION_DECAY
        state.in_flight = schedule
        state.step += 1

    def complete(self, result: StepResult, now: float) -> tuple[Event, ...]:
        """Take over the result of the committed step, which ended at `now`. The events are in batch order.

        Sequences that were aborted meanwhile are skipped, and their sampled tokens dropped.
        """
        schedule = self._finish_step()
        self.state.budget.observe(schedule.shape, now - schedule.now)
        sampled, block_size = iter(result.sampled), self.state.pool.block_size
        events: list[Event] = []
        for request_id, start, length, is_last, _ in schedule.runs:
            outcome = next(sampled) if is_last else None
            sequence = self.state.running.get(request_id)
            if sequence is None:
                continue
            sequence.num_computed = end = start + length
            if end // block_size > start // block_size:
                self._register_blocks(sequence, start)
            if request_id in result.scored:
                scored = result.scored[request_id]
                sequence.num_unscored -= len(scored)
                events.append(PromptEvent(request_id, scored))
            if outcome is None:
                continue
            if isinstance(outcome, SamplingFailure):
                self._end(sequence, Transition.FAIL, outcome.reason)
                events.append(FinishEvent(request_id, *outcome))
                continue
            if not sequence.request.params.max_tokens:  # Only its prompt was scored: drop the sampled token.
                self._end(sequence, Transition.FINISH, FinishReason.LENGTH)
                events.append(FinishEvent(request_id, FinishReason.LENGTH))
                continue
            sequence.tokens.append(outcome.token)
            reason = finish_reason(sequence)
            if reason is not None:
                self._end(sequence, Transition.FINISH, reason)
            events.append(TokenEvent(request_id, outcome, reason, sequence.num_cached))
        return tuple(events)

    def fail(self, message: str) -> tuple[Event, ...]:
        """The committed step failed: end every sequence that was in it. Other sequences are not affected."""
        running = self.state.running
        failed = [running[run.request_id] for run in self._finish_step().runs if run.request_id in running]
        for sequence in failed:
            self._end(sequence, Transition.FAIL, FinishReason.ERROR)
        return tuple(FinishEvent(sequence.id, FinishReason.ERROR, message) for sequence in failed)

    # -- changes of the state ------------------------------------------------------------------------------

    def _finish_step(self) -> Schedule:
        """No step is in flight any more. Release the blocks that waited for its end."""
        state = self.state
        schedule, state.in_flight = state.in_flight, None
        if schedule is None:
            raise RuntimeError("no step is in flight")
        for blocks in state.held_back:
            state.pool.release(blocks)
        state.held_back = []
        return schedule

    def _alive(self, arrival_index: int, request_id: RequestId) -> Sequence | None:
        """A sequence that has not ended, even if its request id was reused."""
        sequence = self.state.get(request_id)
        return sequence if sequence is not None and sequence.arrival_index == arrival_index else None

    def _admit(self, request_id: RequestId, start: int) -> None:
        """Move a sequence from the queue to running, with the cached blocks of its first `start` tokens."""
        state = self.state
        sequence = state.waiting.remove(request_id)
        if not sequence.num_preemptions:
            sequence.num_cached = start
        sequence.block_table = state.find_prefix(sequence)[: start // state.pool.block_size]
        state.pool.share(sequence.block_table)
        sequence.num_computed = start
        sequence.last_step = state.step
        sequence.apply(Transition.ADMIT)
        state.running[request_id] = sequence

    def _advance_virtual_time(self, schedule: Schedule) -> None:
        """Add an equal share of the step's prompt tokens, or the minimum if the queue is long and the share
        is less."""
        state = self.state
        num_left_out = sum(1 for request_id, _ in schedule.left_out if request_id in state.running)
        num_prompts = len(schedule.chunks) + num_left_out + len(state.waiting)
        share = schedule.num_prefill_tokens / max(num_prompts, 1)
        state.virtual_time += max(share, MIN_VIRTUAL_TIME_SHARE * schedule.token_budget)

    def _count_overtaken(self, schedule: Schedule) -> None:
        """Count how often the first sequence of the queue is overtaken while it cannot start."""
        if schedule.admitted:
            [(_, first)] = self.state.waiting.head(1)
            reason = schedule.reasons.get(first.id, schedule.queue_reason)
            if first.id not in schedule.admitted and reason in OVERTAKEN_REASONS:
                first.num_overtaken += len(schedule.admitted)

    def _register_blocks(self, sequence: Sequence, start: int) -> None:
        """Make the blocks shareable that a run has filled. The run began at position `start`."""
        block_size = self.state.pool.block_size
        end = sequence.num_computed // block_size
        extend(sequence.chain, sequence.tokens[: end * block_size], block_size)
        for i in range(start // block_size, end):
            self.state.pool.register(sequence.block_table[i], sequence.chain[i + 1])

    def _grow(self, sequence: Sequence) -> None:
        """Give a running sequence blocks for all its known tokens."""
        pool = self.state.pool
        missing = pool.blocks_for(sequence.num_known) - len(sequence.block_table)
        taken = pool.try_take(missing)
        if taken is None:
            raise RuntimeError(f"the schedule promised {missing} blocks, {pool.num_free} are free")
        sequence.block_table.extend(taken)

    def _preempt(self, sequence: Sequence) -> None:
        """Move a sequence back to the queue. Its tokens stay, and its blocks stay cached until they are
        taken."""
        self._release(sequence)
        sequence.apply(Transition.PREEMPT)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        sequence.guaranteed = sequence.guaranteed or sequence.num_preemptions >= MAX_PREEMPTIONS
        self.state.waiting.add(sequence)

    def _end(self, sequence: Sequence, transition: Transition, reason: FinishReason) -> None:
        """End a sequence: after its last token, after an abort and after an error."""
        if sequence.status is Status.RUNNING:
            self._release(sequence)
        else:
            self.state.waiting.remove(sequence.id)
        sequence.apply(transition)
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and sequence.num_generated:
            self.state.output_lengths.observe(sequence.num_generated)

    def _release(self, sequence: Sequence) -> None:
        """Remove a sequence from running. If the step in flight still writes its blocks, they are held
        back."""
        state = self.state
        del state.running[sequence.id]
        blocks, sequence.block_table = sequence.block_table, []
        runs = () if state.in_flight is None else state.in_flight.runs
        if any(run.request_id == sequence.id for run in runs):
            state.held_back.append(blocks)
        else:
            state.pool.release(blocks)
