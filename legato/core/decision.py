"""Decides one step. `decide` reads the state and changes nothing.

1. If blocks are missing, choose the sequences that are preempted.
2. Give every decode its token. The budget then says what is left for prompts.
3. Put started and waiting prompts in one order.
4. Place the prompts that end within the reserved share of the step, then all others in order.

Each sequence that gets no token is recorded with the reason.
"""

from legato.core.budget import Allowance
from legato.core.lifecycle import Status
from legato.core.placement import Placement
from legato.core.preemption import choose_victims
from legato.core.prompt_order import PromptOrder, order_prompts
from legato.core.request import RequestId
from legato.core.schedule import Chunk, Reason, Schedule
from legato.core.scheduling_policy import Key
from legato.core.sequence import Sequence
from legato.core.state import SchedulerState

MAX_EXAMINED = 64
"""How many waiting sequences a step examines."""
MAX_REFUSED = 8
"""A pass over the prompts stops examining waiting ones after this many of them could not start."""


class LeftOut:
    """The sequences that get no token in a step, and why."""

    def __init__(self) -> None:
        self.reasons: dict[RequestId, Reason] = {}
        self.queue_closed: Reason | None = None
        """Why no further waiting sequence is examined."""
        self.num_refused = 0
        """How many waiting sequences could not start in this pass over the prompts."""

    def close_queue(self, reason: Reason) -> None:
        """Stop examining waiting sequences. Those that are not recorded yet share `reason`."""
        self.queue_closed = reason

    def is_examined(self, prompt: Sequence) -> bool:
        """Started prompts are always examined, waiting ones until the queue is closed."""
        return self.queue_closed is None or prompt.status is Status.RUNNING

    def record(self, prompt: Sequence, reason: Reason) -> None:
        self.reasons[prompt.id] = reason
        if reason in (Reason.BUDGET, Reason.MAX_RUNNING):  # These hold for every sequence further back.
            self.close_queue(reason)
        if prompt.status is not Status.RUNNING and reason is not Reason.PREFIX:  # Followers delay no other.
            self.num_refused += 1


def decide(state: SchedulerState, now: float) -> Schedule:
    """The next step. `now` is in seconds on the engine's clock."""
    running = list(state.running.values())
    victims = [victim.id for victim in choose_victims(running, state.pool)]
    left_out = LeftOut()
    if victims:
        left_out.reasons = dict.fromkeys(victims, Reason.PREEMPTED)
        running = [sequence for sequence in running if sequence.id not in left_out.reasons]
    decoding, started = _split(running)
    # Every decode runs: the preemption made room for it, and `max_running` is within the budget.
    decodes = [Chunk(s.request.id, s.num_computed, 1, True) for s in decoding]
    allowance = state.budget.allow(decoding)
    token_budget = len(decodes) + allowance.left(0)
    candidates = _candidates(state, len(running), left_out)
    order = order_prompts(state, started, candidates)
    placement = Placement(state, order, allowance, running=running, started=started, num_decodes=len(decodes))
    _place_prompts(state, order, placement, left_out, only_waiting=not started)
    num_named = sum(1 for request_id in left_out.reasons if request_id in state.waiting)
    num_others = len(state.waiting) - len(placement.admitted) - num_named
    return Schedule(
        step=state.step,
        now=now,
        decodes=tuple(decodes),
        chunks=tuple(placement.chunks),
        admitted=tuple(placement.admitted),
        preempted=tuple(victims),
        left_out=tuple(left_out.reasons.items()),
        queue_reason=(left_out.queue_closed or Reason.NOT_EXAMINED) if num_others else None,
        num_not_examined=num_others,
        token_budget=token_budget,
        limited_by=allowance.limited_by,
        target=allowance.target,
        margin=allowance.margin,
        cost=allowance.cost,
    )


def _split(running: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Decodes, which have one token to compute, and started prompts, which have more."""
    decoding: list[Sequence] = []
    started: list[Sequence] = []
    for sequence in running:
        # This is `num_remaining` written out: the loop visits every running sequence in every step.
        is_decode = len(sequence.tokens) - sequence.num_computed == 1
        (decoding if is_decode else started).append(sequence)
    return decoding, started


def _candidates(state: SchedulerState, num_running: int, left_out: LeftOut) -> list[tuple[Key, Sequence]]:
    """The head of the queue with its keys, if any sequence may be admitted in this step."""
    if left_out.reasons:
        left_out.close_queue(Reason.PREEMPTION)
    elif num_running >= state.config.max_running:
        left_out.close_queue(Reason.MAX_RUNNING)
    else:
        return state.waiting.head(MAX_EXAMINED)
    return []


def _place_prompts(
    state: SchedulerState, order: PromptOrder, placement: Placement, left_out: LeftOut, *, only_waiting: bool
) -> None:
    settled = _place_ending(state, order, placement, left_out)
    left_out.num_refused = 0
    for prompt in order.prompts:
        if left_out.queue_closed is not None and only_waiting:
            return
        if prompt.id not in settled and left_out.is_examined(prompt):
            _place(prompt, placement, left_out)
        if left_out.num_refused == MAX_REFUSED and left_out.queue_closed is None:
            left_out.close_queue(Reason.NOT_EXAMINED)


def _place(prompt: Sequence, placement: Placement, left_out: LeftOut) -> Chunk | None:
    placed = placement.place(prompt)
    if isinstance(placed, Reason):
        left_out.record(prompt, placed)
        return None
    return placed


def _place_ending(
    state: SchedulerState, order: PromptOrder, placement: Placement, left_out: LeftOut
) -> set[RequestId]:
    """Place the prompts that end in this step within the share reserved for them. Returns those examined.

    The reserved share leaves the first prompt of the order its chunk. So short prompts pass long ones, and
    the first prompt makes progress in any case.
    """
    settled: set[RequestId] = set()
    share = state.policy.ending_share
    if not order.prompts or not share or state.prefill_policy.whole:  # Whole prompts all end in their step.
        return settled
    start = placement.start_of(order.prompts[0])
    reserved = placement.allowance.split_off(share, start, state.config.min_chunk)
    for prompt in order.prompts:
        if reserved.left(0) < 1 or left_out.num_refused == MAX_REFUSED:
            break
        if not left_out.is_examined(prompt) or placement.is_blocked(prompt):
            continue
        if _ends_within(prompt, reserved, state, placement):
            settled.add(prompt.id)
            if (chunk := _place(prompt, placement, left_out)) is not None:
                reserved.take(chunk.start, chunk.length, chunk.num_scored)
    return settled


def _ends_within(prompt: Sequence, reserved: Allowance, state: SchedulerState, placement: Placement) -> bool:
    """Whether a chunk within an allowance can be the last one of a prompt."""
    if prompt.status is not Status.RUNNING:
        # Look up one block before all of them: the first block that must come from the cache. It is mostly
        # absent.
        last_cached = state.pool.blocks_for(prompt.num_known - reserved.left(0))
        if last_cached > 0 and not state.pool.find(prompt.chain[last_cached : last_cached + 1]):
            return False
    start = placement.start_of(prompt)
    remaining, left = prompt.num_known - start, reserved.left(start, scored=prompt.num_unscored > 0)
    return remaining <= min(state.prefill_policy.chunk_len(remaining, left, False), left)
