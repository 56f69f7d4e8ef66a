"""One engine stepped by hand: what a step records, and what happens when it breaks."""

from dataclasses import replace

import pytest
from rigs import VOCAB, Watcher, assert_idle, make_engine, make_request

from legato.core.events import FinishEvent, TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.prefill_policy import Chunked
from legato.core.request import RequestId
from legato.core.step_plan import StepPlan
from legato.engine.engine import Engine
from legato.engine.fake import FakeRunner, next_token
from legato.errors import StepError


def test_the_docstring_of_the_fake_runner_is_true() -> None:
    assert next_token([5, 7], 100) == 13
    assert next_token([5, 7, 13], 100) == 27
    assert next_token([5, 7, 13, 27], 100) == 55


def test_eight_streams_get_a_token_in_every_step_beside_a_long_prompt() -> None:
    """Budget 64, a prompt of 2,000 tokens: no step is larger, and no stream misses one."""
    watcher = Watcher()
    engine = make_engine(budget=64, max_running=16, num_blocks=1000, block_size=4, observers=(watcher,))
    for i in range(8):
        engine.submit(make_request(f"s{i}", max_tokens=60))
    engine.step()
    engine.submit(make_request("long", tuple(i % VOCAB for i in range(2000)), max_tokens=1))
    while engine.has_work:
        engine.step()
    long_steps = [r for r in watcher.records if any(c.request_id == "long" for c in r.schedule.runs)]
    assert len(long_steps) == -(-2000 // 56)
    assert max(record.schedule.num_tokens for record in watcher.records) == 64
    for record in long_steps:
        assert len(record.schedule.decodes) == 8
        tokens = [event.request_id for event in record.events if isinstance(event, TokenEvent)]
        assert {f"s{i}" for i in range(8)} <= set(tokens)
    assert_idle(engine)


def test_a_record_says_what_the_step_did() -> None:
    watcher = Watcher()
    engine = make_engine(budget=8, policy=Chunked(4), observers=(watcher,))
    engine.submit(make_request("A", (1, 2, 3, 4, 5, 6), max_tokens=1))
    engine.step()
    record = watcher.records[0]
    assert (record.schedule.num_tokens, record.num_running, record.num_waiting) == (4, 1, 0)
    assert (record.blocks_used, record.blocks_total, record.schedule.token_budget) == (2, 64, 8)
    assert record.error is None
    assert record.elapsed > 0
    engine.step()
    assert watcher.records[1].blocks_used == 0
    assert watcher.submitted_ids == ["A"]


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (RuntimeError("secret internals"), "RuntimeError"),
        (StepError("request A: the logits are not numbers"), "the logits are not numbers"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_step_that_raises_ends_its_requests_and_no_others(error: Exception, word: str) -> None:
    """D-10 of failures: those in the step are told why, those outside go on, and nothing leaks."""
    broken = True

    def before(plan: StepPlan) -> None:  # noqa: ARG001
        if broken:
            raise error

    watcher = Watcher()
    engine = make_engine(budget=4, max_running=2, before=before, observers=(watcher,))
    for name in ("A", "B", "C"):
        engine.submit(make_request(name, (1, 2), max_tokens=2))
    events = engine.step()
    assert {event.request_id for event in events} == {"A", "B"}
    for event in events:
        assert isinstance(event, FinishEvent)
        assert event.reason is FinishReason.ERROR
        assert word in event.message
        assert "secret" not in event.message
    assert watcher.records[0].error is not None
    broken = False
    while engine.has_work:
        last = engine.step()
    assert last[-1].request_id == "C"
    assert_idle(engine)


def test_ctrl_c_in_a_step_ends_the_step_and_leaves_the_engine_usable() -> None:
    """What ended with it, and what was over its deadline when it began, is told by the next step."""
    interrupt = True

    def before(plan: StepPlan) -> None:  # noqa: ARG001
        if interrupt:
            raise KeyboardInterrupt

    watcher = Watcher()
    engine = make_engine(before=before, observers=(watcher,))
    engine.submit(make_request("A"))
    engine.submit(replace(make_request("late"), deadline=0.0))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert_idle(engine)
    assert engine.has_work, "nobody knows yet"
    assert [record.error for record in watcher.records] == ["KeyboardInterrupt"]
    interrupt = False
    engine.submit(make_request("B", max_tokens=1))
    late, a, b = engine.step()
    assert late == FinishEvent(RequestId("late"), FinishReason.TIMEOUT)
    assert isinstance(a, FinishEvent)
    assert (a.request_id, a.reason, b.request_id) == ("A", FinishReason.ERROR, "B")
    assert not engine.has_work


def test_ctrl_c_in_the_last_step_leaves_its_events_for_one_more_call() -> None:
    def before(plan: StepPlan) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    engine = make_engine(before=before)
    engine.submit(make_request("A"))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_work
    assert [event.request_id for event in engine.step()] == ["A"]
    assert not engine.has_work


def test_an_abort_is_told_to_observers_once() -> None:
    watcher = Watcher()
    engine = make_engine(observers=(watcher,))
    engine.submit(make_request("A"))
    engine.abort(RequestId("A"))
    engine.abort(RequestId("A"))
    assert watcher.aborts == [("A", FinishReason.ABORT)]


@pytest.mark.parametrize("broken", ["submitted", "stepped", "aborted"])
def test_an_observer_that_fails_is_told_nothing_more_and_requests_are_served(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """G-01: metrics never reach the loop, whichever of their calls breaks."""

    class Broken(Watcher):
        pass

    setattr(Broken, broken, lambda *_: 1 / 0)
    watcher = Watcher()
    engine = make_engine(observers=(Broken(), watcher))
    engine.submit(make_request("left"))
    engine.submit(replace(make_request("late"), deadline=0.0))
    engine.abort(RequestId("left"))
    engine.submit(make_request("A", max_tokens=3))
    events = [event for _ in range(3) for event in engine.step()]
    assert [event.request_id for event in events] == ["late", "A", "A", "A"]
    assert watcher.submitted_ids == ["left", "late", "A"]
    assert [request_id for request_id, _ in watcher.aborts] == ["left", "late"]
    assert len(watcher.records) == 3
    assert caplog.text.count("Broken failed and is not called any more") == 1
    assert_idle(engine)


def test_pool_and_runner_must_agree() -> None:
    engine = make_engine(num_blocks=8)
    with pytest.raises(ValueError, match="the pool has 8 blocks of 4 tokens, the runner 7 of 4"):
        Engine.on_runner(
            engine.scheduler,
            FakeRunner(num_blocks=7, block_size=4, vocab_size=10),
            clock=lambda: 0.0,
        )


def test_a_request_past_its_deadline_ends_before_the_step_and_every_observer_is_told() -> None:
    """The clock goes up by one with each look: the deadline passes while the first steps run."""
    watcher = Watcher()
    engine = make_engine(max_running=1, observers=(watcher,))
    engine.submit(make_request("running", max_tokens=40))
    engine.submit(replace(make_request("late", (9, 9, 9)), deadline=4.0))
    events = [event for _ in range(6) for event in engine.step()]
    assert events.count(FinishEvent(RequestId("late"), FinishReason.TIMEOUT)) == 1
    assert watcher.aborts == [(RequestId("late"), FinishReason.TIMEOUT)]
    assert all("late" not in record.schedule.admitted for record in watcher.records)
    engine.abort(RequestId("running"))
    assert_idle(engine)


def test_a_step_in_which_the_last_request_expires_runs_nothing() -> None:
    watcher = Watcher()
    engine = make_engine(observers=(watcher,))
    engine.submit(replace(make_request("late"), deadline=0.0))
    assert engine.step() == (FinishEvent(RequestId("late"), FinishReason.TIMEOUT),)
    assert watcher.records == []
    assert_idle(engine)
