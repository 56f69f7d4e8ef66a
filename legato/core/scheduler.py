"""The scheduler: which sequences run in the next step, and with how many tokens.

There is no prefill phase and no decode phase. Every running sequence has known tokens and computed tokens,
and a step lets computed catch up with known, under one token budget: decodes first, then prompts already
started, then new ones.

    schedule(now) -> Schedule    decides; changes nothing
    commit(schedule)             takes and gives back blocks, moves sequences
    plan(scheduler, schedule)    (core.plan) the integers for the runner
    complete(result) -> events   appends tokens, ends what is done, frees its blocks

What may enter this file: the order of sequences and who holds blocks. How long a chunk is belongs to the
prefill policy, when a reply ends to `stopping`, tensors and text to other rooms. Time is an argument.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from legato.core import law
from legato.core.block_pool import BlockPool
from legato.core.draft import Draft
from legato.core.events import Event, FinishEvent, TokenEvent
from legato.core.lifecycle import Move, Status
from legato.core.plan import StepResult
from legato.core.prefill import FillBudget, PrefillPolicy
from legato.core.request import Request, RequestId
from legato.core.schedule import Schedule
from legato.core.sequence import Sequence
from legato.core.stopping import FinishReason, finish_reason
from legato.errors import ConfigError, ContextLengthError, RequestError


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

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running", "max_model_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        if self.max_running > self.max_batch_tokens:
            raise ConfigError(
                f"max_running ({self.max_running}) is above max_batch_tokens ({self.max_batch_tokens}): "
                "the decodes of all running sequences must fit in one step",
                param="max_running",
            )


class Scheduler:
    """Order of seniority = order of arrival, everywhere: the oldest sequence always makes progress."""

    def __init__(
        self, config: SchedulerConfig, blocks: BlockPool, *, prefill_policy: PrefillPolicy | None = None
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.prefill_policy = prefill_policy or FillBudget()
        self.step = 0
        """Steps committed so far."""
        self.waiting: OrderedDict[RequestId, Sequence] = OrderedDict()
        """The queue: preempted sequences first, all in order of arrival."""
        self.running: dict[RequestId, Sequence] = {}
        """Sequences that hold blocks, oldest first."""
        self._in_flight: Schedule | None = None
        self._held: list[int] = []

    # -- queries: none of them changes anything --------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def in_flight(self) -> Schedule | None:
        """The schedule that was committed and is not complete."""
        return self._in_flight

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """Blocks of sequences aborted while the step in flight still writes to them."""
        return tuple(self._held)

    def sequence(self, request_id: RequestId) -> Sequence:
        """The living sequence of a request; raises KeyError if there is none."""
        return self.running.get(request_id) or self.waiting[request_id]

    def blocks_to_admit(self, sequence: Sequence) -> int:
        """Blocks that must be free for a sequence to leave the queue.

        All its known tokens and one block to go on with, but never more than it can ever use: so whatever
        `add` accepts can always run alone.
        """
        known = self.blocks.blocks_for(sequence.num_known)
        return min(known + 1, self.blocks.blocks_for(sequence.request.max_computed))

    # -- requests in and out ---------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Refuse what can never be served, with the numbers.

        Raises `ContextLengthError` if it can never fit, `RequestError` for an empty prompt or an id that is
        no token. It reads only what never changes, so any thread may call it.
        """
        if not request.prompt:
            raise RequestError("the prompt holds no token", param="prompt")
        params = request.params
        self._check_ids("prompt", request.prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", [token for token, _ in params.logit_bias])
        num_prompt, max_tokens = len(request.prompt), params.max_tokens
        if num_prompt + max_tokens > self.config.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and asks for {max_tokens} more; "
                f"together at most {self.config.max_model_len} are possible",
                param="prompt",
            )
        need = self.blocks.blocks_for(request.max_computed)
        if need > self.blocks.num_blocks:
            raise ContextLengthError(
                f"the prompt of {num_prompt} tokens and {max_tokens} more need {need} blocks of "
                f"{self.blocks.block_size} tokens; the KV cache has {self.blocks.num_blocks}",
                param="prompt",
            )

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.config.vocab_size:
            raise RequestError(f"{name}: token ids run from 0 to {self.config.vocab_size - 1}", param=name)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue. Raises as `validate` does, and for an id in use."""
        self.validate(request)
        if request.id in self.running or request.id in self.waiting:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        self.waiting[request.id] = Sequence.of(request)

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> tuple[Event, ...]:
        """End a request from outside, in whatever state it is. An unknown id is no error: it just ended."""
        sequence = self.running.get(request_id) or self.waiting.get(request_id)
        if sequence is None:
            return ()
        self._end(sequence, Move.ABORT)
        return (FinishEvent(request_id, reason),)

    # -- the step --------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Schedule:
        """Decide the next step. `now` is in seconds on the engine's clock."""
        draft = Draft(self)
        draft.place_decodes()
        draft.place_started()
        draft.place_waiting()
        return draft.schedule(self.step, now)

    def commit(self, schedule: Schedule) -> None:
        """Make a schedule so. It must come from this very state, with no step in flight."""
        if self._in_flight is not None or schedule.step != self.step:
            raise RuntimeError(f"schedule {schedule.step} is not the next step ({self.step})")
        for request_id in schedule.preempted:
            self._preempt(self.running[request_id])
        for request_id in schedule.admitted:
            sequence = self.waiting.pop(request_id)
            sequence.move(Move.ADMIT)
            self.running[request_id] = sequence
        for run in schedule.runs:
            self._grow(self.running[run.request_id])
        self._in_flight = schedule
        self.step += 1

    def complete(self, result: StepResult) -> tuple[Event, ...]:
        """Absorb what the committed step computed, in the order of its runs.

        Sequences that were aborted meanwhile are skipped, their sampled tokens dropped.
        """
        schedule = self._land()
        sampled = iter(result.sampled)
        events: list[Event] = []
        for run in schedule.runs:
            token = next(sampled) if run.last else None
            sequence = self.running.get(run.request_id)
            if sequence is None:
                continue
            sequence.num_computed = run.end
            if token is None:
                continue
            sequence.tokens.append(token.token)
            reason = finish_reason(sequence)
            if reason is not None:
                self._end(sequence, Move.FINISH)
            events.append(TokenEvent(run.request_id, token, reason))
        return tuple(events)

    def fail(self, message: str) -> tuple[Event, ...]:
        """The committed step failed: end every sequence that was in it. The others stay as they are."""
        schedule = self._land()
        events: list[Event] = []
        for run in schedule.runs:
            sequence = self.running.get(run.request_id)
            if sequence is not None:
                self._end(sequence, Move.FAIL)
                events.append(FinishEvent(run.request_id, FinishReason.ERROR, message))
        return tuple(events)

    # -- the law, recomputed from scratch ---------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError if the state contradicts itself. Called by tests after every call."""
        law.check_state(self)

    def check_schedule(self, schedule: Schedule) -> None:
        """Raises AssertionError if a schedule, decided and not yet committed, breaks the law."""
        law.check_schedule(self, schedule)

    # -- the only places where blocks and states change --------------------------------------------------

    def _land(self) -> Schedule:
        """Take the step out of flight, and free what waited for it."""
        schedule, self._in_flight = self._in_flight, None
        if schedule is None:
            raise RuntimeError("no step is in flight")
        self.blocks.release(self._held)
        self._held = []
        return schedule

    def _grow(self, sequence: Sequence) -> None:
        """Give a running sequence blocks for all its known tokens."""
        missing = self.blocks.blocks_for(sequence.num_known) - len(sequence.blocks)
        taken = self.blocks.try_take(missing)
        if taken is None:
            raise RuntimeError(f"the schedule promised {missing} blocks, {self.blocks.num_free} are free")
        sequence.blocks.extend(taken)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue: the blocks are lost, the tokens stay and are prefilled again."""
        self._release(sequence)
        sequence.move(Move.PREEMPT)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.waiting[sequence.id] = sequence
        self.waiting.move_to_end(sequence.id, last=False)

    def _end(self, sequence: Sequence, move: Move) -> None:
        """The one way out, for a finish, an abort and an error."""
        if sequence.status is Status.RUNNING:
            self._release(sequence)
        else:
            del self.waiting[sequence.id]
        sequence.move(move)

    def _release(self, sequence: Sequence) -> None:
        """A sequence leaves `running` and gives up its blocks, unless a step in flight still writes them."""
        del self.running[sequence.id]
        blocks, sequence.blocks = sequence.blocks, []
        in_step = self._in_flight is not None and any(
            run.request_id == sequence.id for run in self._in_flight.runs
        )
        if in_step:
            self._held.extend(blocks)
        else:
            self.blocks.release(blocks)
