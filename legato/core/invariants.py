"""The invariants of the scheduler, recomputed from scratch: slow, obvious, and independent of the decision
code.

Tests call these checks around every step. A failed check is a bug in Legato, hence `assert`. The numbers in
comments are those of the invariants in docs/architecture.md.
"""

from collections import Counter

from legato.core.admission import PARTIAL_SHARE
from legato.core.budget import FLOOR_SHARE, LimitedBy
from legato.core.lifecycle import Status
from legato.core.preemption import seniority
from legato.core.prefill_policy import PrefillPolicy
from legato.core.prefix_index import extend
from legato.core.prompt_order import MAX_OVERTAKEN
from legato.core.schedule import Chunk, Schedule
from legato.core.sequence import Sequence
from legato.core.state import SchedulerState
from legato.cost.step_cost import shape_of


def check_state(state: SchedulerState) -> None:
    """Queue, running sequences and pool agree with each other."""
    pool, running, waiting = state.pool, state.running, state.waiting
    pool.check()
    held = Counter(block for sequence in running.values() for block in sequence.block_table)
    held.update([block for blocks in state.held_back for block in blocks])
    holders = {block: pool.num_holders(block) for block in range(pool.num_blocks) if pool.num_holders(block)}
    assert held == holders, "a block is lost, or its holders are counted wrongly"  # 6: nothing leaks
    assert not running.keys() & set(waiting), "a sequence runs and waits"
    assert len(running) <= state.config.max_running, "too many sequences run"
    for request_id, sequence in running.items():
        assert request_id == sequence.id
        assert sequence.status is Status.RUNNING
        assert 0 <= sequence.num_computed < sequence.num_known
        assert sequence.num_computed <= len(sequence.block_table) * pool.block_size, "computed without blocks"
        assert sequence.num_known <= sequence.request.max_computed, "it should have finished"
        _check_content(state, sequence)
    for request_id, sequence in waiting.items():
        assert request_id == sequence.id
        preempted = sequence.num_preemptions > 0
        assert sequence.status is (Status.PREEMPTED if preempted else Status.WAITING)
        assert not sequence.block_table, "a waiting sequence holds blocks"
        assert sequence.num_computed == 0
    keys = [state.policy.key(sequence) for sequence in waiting.values()]
    assert keys == sorted(set(keys)), "the queue is not in order"
    guaranteed = [sequence for sequence in running.values() if sequence.guaranteed]
    blocks = {block for sequence in guaranteed for block in sequence.block_table}
    growth = [pool.blocks_for(s.request.max_computed) - len(s.block_table) for s in guaranteed]
    assert len(blocks) + sum(growth) <= pool.num_blocks, "more guaranteed than there is"  # 7
    if state.in_flight is None:
        assert not [block for blocks in state.held_back for block in blocks], (
            "blocks wait for a step that is over"
        )


def _check_content(state: SchedulerState, sequence: Sequence) -> None:
    """The registered digests of a sequence's blocks are those of its tokens."""
    pool = state.pool
    chain = sequence.chain[:1]
    extend(chain, sequence.tokens, pool.block_size)
    assert sequence.chain == chain[: len(sequence.chain)], "the chain is not that of the tokens"
    for i, block in enumerate(sequence.block_table):
        computed = (i + 1) * pool.block_size <= sequence.num_computed
        if pool.is_registered(block):
            assert computed, "a block is shareable before it is computed"  # 6
            assert pool.digest(block) == chain[i + 1], "a block is registered under a wrong digest"
        else:
            assert pool.num_holders(block) == 1, "a shared block is not registered"


def check_schedule(state: SchedulerState, schedule: Schedule) -> None:
    """A schedule that was decided for the scheduler's present state satisfies the invariants."""
    _check_runs(state, schedule)
    _check_target(schedule, state.prefill_policy)
    _check_blocks(state, schedule)
    _check_preempted(state, schedule)
    _check_admitted(state, schedule)
    runs = {run.request_id for run in schedule.runs}
    everyone = state.running.keys() | set(state.waiting)
    reasons = state.explain(schedule)
    assert reasons.keys() == everyone - runs, "neither run nor explained, or both"
    # 2: no decode is left out but those that lost their blocks
    decodes = {i for i, s in state.running.items() if s.num_remaining == 1}
    assert decodes - runs <= set(schedule.preempted), "a decode was left out"
    # 4: work that fits is done, and something always fits
    assert schedule.runs or not everyone, "there is work, and the step does nothing"


def _check_runs(state: SchedulerState, schedule: Schedule) -> None:
    config, policy = state.config, state.prefill_policy
    total = sum(run.length for run in schedule.runs)
    whole_alone = policy.whole and len(schedule.runs) == 1 and schedule.runs[0].is_last
    assert total <= config.max_batch_tokens or whole_alone, f"{total} tokens in one step"  # 1
    assert len({run.request_id for run in schedule.runs}) == len(schedule.runs), "a sequence runs twice"
    size = state.pool.block_size
    for run in schedule.runs:
        sequence = state.sequence(run.request_id)
        assert run.length >= 1
        assert run.end <= sequence.num_known, "past the last known token"
        assert run.is_last == (run.end == sequence.num_known)  # 3
        if run.request_id in schedule.admitted:
            assert run.start % size == 0, "a cached prefix ends within a block"
            assert run.start // size <= len(state.find_prefix(sequence)), "a prefix that is not there"
        else:
            assert run.start == sequence.num_computed, "a gap or an overlap"
        for block in sequence.block_table[run.start // size : -(-run.end // size)]:
            assert state.pool.num_holders(block) == 1, "a shared block would be written"
            assert not state.pool.is_registered(block), "a known block would be written"
    for run in schedule.decodes:
        assert run.length == 1
        assert run.is_last
    for chunk in schedule.chunks[1:]:
        sequence = state.sequence(chunk.request_id)
        asked = policy.chunk_len(sequence.num_known - chunk.start, config.max_batch_tokens, False)
        enough = chunk.is_last or chunk.length >= min(config.min_chunk, asked)
        assert enough or _takes_as_long(schedule, chunk, config.min_chunk), "a chunk below the minimum"


def _takes_as_long(schedule: Schedule, chunk: Chunk, length: int) -> bool:
    """Whether one more token would make a chunk take longer than `length` tokens at the start of a text."""
    cost = schedule.cost
    if cost is None or schedule.limited_by is LimitedBy.TOKENS:
        return False
    scored = chunk.length + 1 if chunk.num_scored else 0
    enough = cost.chunk_seconds(0, length) * (1 - 1e-9)
    return cost.chunk_seconds(chunk.start, chunk.length + 1, scored) >= enough


def _check_target(schedule: Schedule, policy: PrefillPolicy) -> None:
    """Chunks that the target bounds keep to it. Where they do not, the limit says so, and they take no longer
    than `FLOOR_SHARE`. Exceptions: whole prompts are never cut, a first chunk may have two tokens, and one of
    a single token costs as much as a decode.
    """
    if schedule.target is None or schedule.cost is None or not schedule.shape.num_prefill:
        return
    assert schedule.predicted is not None
    within = schedule.predicted * schedule.margin <= schedule.target * (1 + 1e-9)
    assert within or schedule.limited_by is not LimitedBy.TARGET, "over the target"
    if not within and not policy.whole and schedule.chunks[-1].length > 2:
        alone = schedule.cost.seconds(shape_of((run.start, 1, True) for run in schedule.decodes))
        seconds = sum(schedule.cost.chunk_seconds(*chunk[1:3], chunk.num_scored) for chunk in schedule.chunks)
        assert seconds <= FLOOR_SHARE * max(schedule.target, alone) * (1 + 1e-9), "over the floor"


def _check_blocks(state: SchedulerState, schedule: Schedule) -> None:
    """The blocks that the schedule needs are there: freed by preemption, then enough for every run."""
    pool = state.pool
    left = Counter({block: pool.num_holders(block) for block in range(pool.num_blocks)})
    left.subtract(block for i in schedule.preempted for block in state.running[i].block_table)
    need = 0
    for run in schedule.runs:
        sequence = state.sequence(run.request_id)
        blocks = sequence.block_table
        if run.request_id in schedule.admitted:
            blocks = state.find_prefix(sequence)[: run.start // pool.block_size]
            left.update(blocks)
        need += pool.blocks_for(sequence.num_known) - len(blocks)
    assert need <= sum(1 for num in left.values() if num == 0), "more blocks promised than there are"
    after = len(state.running) - len(schedule.preempted) + len(schedule.admitted)
    assert after <= state.config.max_running


def _check_preempted(state: SchedulerState, schedule: Schedule) -> None:
    running, pool = state.running, state.pool
    preempted = [running[request_id] for request_id in schedule.preempted]
    if not preempted:
        return
    assert not schedule.admitted, "admitted in a step that preempted"
    assert not any(victim.guaranteed for victim in preempted), "a guarantee was broken"
    assert min(running.values(), key=seniority) not in preempted, "the most senior lost its blocks"
    decodes = [sequence for sequence in running.values() if sequence.num_remaining == 1]
    need = sum(pool.blocks_for(sequence.num_known) - len(sequence.block_table) for sequence in decodes)
    assert need > pool.num_free, "preempted without need"


def _check_admitted(state: SchedulerState, schedule: Schedule) -> None:
    waiting, pool = state.waiting, state.pool
    chunks = {chunk.request_id: chunk for chunk in schedule.chunks}
    assert set(schedule.admitted) <= chunks.keys() & set(waiting), "admitted without tokens"
    queue = list(waiting)
    for place, request_id in enumerate(queue):
        sequence = waiting[request_id]
        if sequence.num_preemptions or sequence.num_overtaken >= MAX_OVERTAKEN:
            overtakers = set(queue[place:]) & set(schedule.admitted)
            assert request_id in schedule.admitted or not overtakers, "one was overtaken too often"  # 4
    begun = {i for i, s in state.running.items() if s.num_remaining > 1} - set(schedule.preempted)
    left = [i for i in begun | set(schedule.admitted) if i not in chunks or not chunks[i].is_last]
    if any(i in left for i in schedule.admitted) and len(left) > 1:
        blocks = sum(pool.blocks_for(state.sequence(i).num_known) for i in left)
        assert blocks <= PARTIAL_SHARE * pool.num_blocks, "prompts in part hold too much"
