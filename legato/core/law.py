"""The scheduler's law, recomputed from scratch: slow, obvious, and independent of how decisions are made.

A failed check is a bug of ours, hence `assert`. Numbers in comments are those of the law in
docs/architecture.md.
"""

from typing import TYPE_CHECKING

from legato.core.lifecycle import Status
from legato.core.schedule import Schedule

if TYPE_CHECKING:
    from legato.core.scheduler import Scheduler


def check_state(scheduler: "Scheduler") -> None:
    """Queue, running sequences and pool agree with each other."""
    pool, running, waiting = scheduler.blocks, scheduler.running, scheduler.waiting
    pool.check()
    held = [block for sequence in running.values() for block in sequence.blocks]
    held += scheduler.held_blocks
    assert len(set(held)) == len(held), "a block is held twice"
    assert not set(held) & pool.free_blocks(), "a held block is free"
    assert len(held) == pool.num_used, "a block is lost"  # 6: nothing leaks
    assert not running.keys() & waiting.keys(), "a sequence runs and waits"
    assert len(running) <= scheduler.config.max_running, "too many sequences run"
    for request_id, sequence in running.items():
        assert request_id == sequence.id
        assert sequence.status is Status.RUNNING
        assert 0 <= sequence.num_computed < sequence.num_known
        assert sequence.num_computed <= len(sequence.blocks) * pool.block_size, "computed without blocks"
        assert sequence.num_known <= sequence.request.max_computed, "it should have finished"
    for request_id, sequence in waiting.items():
        assert request_id == sequence.id
        preempted = sequence.num_preemptions > 0
        assert sequence.status is (Status.PREEMPTED if preempted else Status.WAITING)
        assert not sequence.blocks, "a waiting sequence holds blocks"
        assert sequence.num_computed == 0
    if scheduler.in_flight is None:
        assert not scheduler.held_blocks, "blocks wait for a step that is over"


def check_schedule(scheduler: "Scheduler", schedule: Schedule) -> None:
    """A schedule that was decided for the scheduler's present state keeps the law."""
    _check_runs(scheduler, schedule)
    _check_blocks(scheduler, schedule)
    runs = {run.request_id for run in schedule.runs}
    preempted, admitted = set(schedule.preempted), set(schedule.admitted)
    left_out = dict(schedule.left_out)
    # 2: no decode is left out but those that lost their blocks
    for request_id, sequence in scheduler.running.items():
        assert (request_id in runs) != (request_id in left_out), "neither run nor explained"
        if sequence.remaining == 1:
            assert (request_id in runs) != (request_id in preempted), "a decode was left out"
    assert preempted <= scheduler.running.keys()
    assert not preempted & runs
    assert not (preempted and admitted), "admitted in a step that preempted"
    # 3 and fairness by age: the queue is served from its head, the blocks go to the oldest
    queue, ages = list(scheduler.waiting), list(scheduler.running)
    assert list(schedule.admitted) == queue[: len(admitted)], "the queue was not served in order"
    assert set(ages[len(ages) - len(preempted) :]) == preempted, "an older sequence lost its blocks"
    # 4: work that fits is done
    if scheduler.running.keys() - preempted:
        assert schedule.runs, "sequences run, and the step does nothing"
    elif not preempted and queue:
        assert schedule.runs, "the queue stands still and nothing runs"


def _check_runs(scheduler: "Scheduler", schedule: Schedule) -> None:
    budget, policy = scheduler.config.max_batch_tokens, scheduler.prefill_policy
    total = sum(run.length for run in schedule.runs)
    whole_alone = policy.whole and len(schedule.runs) == 1 and schedule.runs[0].last
    assert total <= budget or whole_alone, f"{total} tokens in a step of at most {budget}"  # 1
    assert len({run.request_id for run in schedule.runs}) == len(schedule.runs), "a sequence runs twice"
    for run in schedule.runs:
        sequence = scheduler.sequence(run.request_id)
        assert run.length >= 1
        assert run.start == sequence.num_computed, "a gap or an overlap"
        assert run.end <= sequence.num_known, "past the last known token"
        assert run.last == (run.end == sequence.num_known)  # 3
    for run in schedule.decodes:
        assert run.length == 1
        assert run.last
    for request_id in schedule.admitted:
        assert any(chunk.request_id == request_id for chunk in schedule.chunks), "admitted without tokens"


def _check_blocks(scheduler: "Scheduler", schedule: Schedule) -> None:
    """What the schedule promises is there: freed by preemption, then enough for every run."""
    pool = scheduler.blocks
    free = pool.num_free + sum(len(scheduler.running[i].blocks) for i in schedule.preempted)
    for run in schedule.runs:
        sequence = scheduler.sequence(run.request_id)
        free -= pool.blocks_for(sequence.num_known) - len(sequence.blocks)
    assert free >= 0, "more blocks promised than there are"
    after = len(scheduler.running) - len(schedule.preempted) + len(schedule.admitted)
    assert after <= scheduler.config.max_running
