"""Progress of prompts, step by step, by hand."""

import time
import timeit
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
from rigs import make_engine, make_request

from legato.core.events import Event, ProgressEvent
from legato.core.request import RequestId
from legato.core.step_plan import StepPlan
from legato.engine.engine import Engine

Told = list[tuple[str, int, int, int, int | None]]


def submit(engine: Engine, name: str, prompt: Iterable[int], *, asks: bool = True, num: int = 3) -> None:
    engine.submit(replace(make_request(name, tuple(prompt), num), wants_progress=asks))


def told(events: Iterable[Event]) -> Told:
    return [event[:5] for event in events if isinstance(event, ProgressEvent)]


def rest(engine: Engine) -> Told:
    entries: Told = []
    while engine.has_work:
        entries += told(engine.step())
    return entries


def test_each_chunk_is_told_and_the_last_one_with_the_first_token() -> None:
    engine = make_engine(budget=8)
    submit(engine, "a", range(20))
    assert told(engine.step()) == [("a", 8, 20, 0, None)]
    assert told(engine.step()) == [("a", 16, 20, 0, None)]
    events = engine.step()
    assert told(events) == [("a", 20, 20, 0, None)]
    assert isinstance(events[0], ProgressEvent), "before the token"
    assert rest(engine) == []


def test_who_waits_hears_its_place_and_only_when_it_changes() -> None:
    engine = make_engine(max_running=1, budget=8)
    submit(engine, "a", range(20), num=2)
    assert told(engine.step()) == [("a", 8, 20, 0, None)]
    submit(engine, "b", [50, 51], asks=False, num=1)
    submit(engine, "c", [60, 61], num=1)
    assert told(engine.step()) == [("a", 16, 20, 0, None), ("c", 0, 2, 0, 1)]
    assert rest(engine) == [("a", 20, 20, 0, None), ("c", 0, 2, 0, 0)]


def test_a_prompts_cached_beginning_counts_as_computed() -> None:
    engine = make_engine(budget=8)
    submit(engine, "a", range(20), asks=False)
    rest(engine)
    submit(engine, "b", [*range(16), 90, 91, 92, 93, 94])
    assert told(engine.step()) == [("b", 21, 21, 16, None)]


def test_a_request_that_ends_early_is_forgotten() -> None:
    engine = make_engine(budget=8)
    submit(engine, "a", range(20))
    engine.step()
    engine.abort(RequestId("a"))
    assert not engine._progress._last, "perhaps no step follows"
    submit(engine, "b", range(30, 40), asks=False)
    assert rest(engine) == []
    assert not engine._progress._last


def test_a_failed_step_ends_the_reports_of_who_was_in_it() -> None:
    def fails(plan: StepPlan) -> None:
        if plan.batch.seqs[0].start:
            raise RuntimeError

    engine = make_engine(budget=8, before=fails)
    submit(engine, "a", range(20))
    assert told(engine.step()) == [("a", 8, 20, 0, None)]
    assert told(engine.step()) == []
    assert not engine._progress._last


def predictions(events: Iterable[Event]) -> dict[str, float | None]:
    return {event.request_id: event.predicted_ttft for event in events if isinstance(event, ProgressEvent)}


def test_the_first_token_is_predicted_by_the_pace_of_the_last_steps_and_what_goes_first() -> None:
    """Steps begin at 0, 2, 4, .. and take 1 each. The first has the 2 tokens of b, which is shorter and goes
    first, so each token of a is taken for half a second; then there were 8 tokens in another second."""
    engine = make_engine(max_running=1, budget=8)
    submit(engine, "a", range(20), num=1)
    submit(engine, "b", [50, 51], num=2)
    assert predictions(engine.step()) == {"b": 1.0, "a": 1 + 20 * 2 / 4}
    assert predictions(engine.step()) == {}, "b decodes, and nothing changes for a"
    assert predictions(engine.step()) == {"a": pytest.approx(5 + 12 * 2 / 10)}
    submit(engine, "c", range(60, 90), num=1)
    told_of_c = predictions(engine.step())["c"]
    assert told_of_c == pytest.approx(7 + (4 + 30) * 3 / 18), "what is left of a goes first"


def test_reports_to_a_long_queue_take_time_in_proportion_to_it() -> None:
    """They are made in the engine's thread, between two steps of everybody's replies."""

    def seconds(num: int) -> float:
        engine = make_engine(budget=8, max_running=1)
        for i in range(num):
            submit(engine, f"r{i}", [i % 250, i // 250, 1, 2])
        schedule = engine.scheduler.schedule(0.0)
        engine.scheduler.commit(schedule)
        report = partial(engine._progress.report, engine.scheduler.state, schedule, 1.0)
        return min(timeit.repeat(report, timer=time.process_time, number=1, repeat=5))

    assert seconds(4_000) < 30 * seconds(500)
