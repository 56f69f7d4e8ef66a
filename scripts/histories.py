"""Record what the scheduler decides in long random histories, to see when a refactoring changes a decision.

    python scripts/histories.py            # writes tests/core/histories/*.jsonl anew

A history is a file of JSON lines: first the settings, then one line for each call with what came of it. A
replay makes the same calls and must write the same bytes. Record anew only where a change of decisions is
meant, and say so in the commit.
"""

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from legato.core.block_pool import BlockPool
from legato.core.events import Event, FinishEvent, TokenEvent
from legato.core.invariants import check_schedule, check_state
from legato.core.output_lengths import OutputLengthEstimator
from legato.core.plan import plan
from legato.core.prefill_policy import Chunked, FillBudget, PrefillPolicy, WholePrompt
from legato.core.request import Request, RequestId
from legato.core.schedule import Schedule
from legato.core.scheduler import Scheduler
from legato.core.scheduling_policy import SCHEDULING_POLICIES
from legato.core.state import SchedulerConfig
from legato.engine.fake import FakeRunner
from legato.sampling_params import SamplingParams

FOLDER = Path(__file__).parent.parent / "tests" / "core" / "histories"
VOCAB = 50
NUM_CALLS = 300
POLICIES: dict[str, PrefillPolicy] = {"fill": FillBudget(), "chunk 7": Chunked(7), "whole": WholePrompt()}

Json = dict[str, Any]

SETTINGS: dict[str, Json] = {
    name: {"order": order, "policy": policy, "num_blocks": num_blocks, "seed": seed, **more}
    for name, order, policy, num_blocks, seed, more in (
        ("fair", "fair", "fill", 40, 1, {}),
        ("fair_tiny_pool", "fair", "fill", 12, 2, {"blind": True}),
        ("fair_chunks", "fair", "chunk 7", 24, 3, {"min_chunk": 3, "blind": True}),
        ("fcfs", "fcfs", "fill", 24, 4, {"blind": True}),
        ("fcfs_whole", "fcfs", "whole", 24, 5, {"prefix_cache": False, "blind": True}),
        ("shortest", "shortest", "fill", 20, 6, {"blind": True}),
        ("priority", "priority", "fill", 20, 7, {"blind": True}),
        ("strict", "fair", "fill", 16, 8, {"strict": True}),
    )
}


class Blind(OutputLengthEstimator):
    """Expects every reply to end at once, so that pools run out."""

    def remaining(self, num_generated: int) -> float:  # noqa: ARG002
        return 1.0


class Player:
    """A scheduler and a fake runner that obey calls written as JSON."""

    def __init__(self, settings: Json) -> None:
        given = dict(settings)
        order, policy, num_blocks = given.pop("order"), given.pop("policy"), given.pop("num_blocks")
        output_lengths = Blind() if given.pop("blind", False) else OutputLengthEstimator()
        del given["seed"]
        config = SchedulerConfig(
            max_batch_tokens=16, max_running=6, max_model_len=num_blocks * 4, vocab_size=VOCAB, **given
        )
        self.scheduler = Scheduler(
            config,
            BlockPool(num_blocks, 4),
            prefill_policy=POLICIES[policy],
            policy=SCHEDULING_POLICIES[order](16),
            output_lengths=output_lengths,
        )
        self._runner = FakeRunner(num_blocks=num_blocks, block_size=4, vocab_size=VOCAB)

    def obey(self, call: Json) -> Json:
        """What came of a call."""
        scheduler = self.scheduler
        if call["call"] == "add":
            scheduler.add(_request(call))
            return {}
        if call["call"] == "abort":
            return {"events": _events(scheduler.abort(RequestId(call["id"])))}
        expired = scheduler.expire(call["now"])
        if not scheduler.state.has_work:
            return {"events": _events(expired)}
        schedule = scheduler.schedule(call["now"])
        check_schedule(scheduler.state, schedule)
        scheduler.commit(schedule)
        if call["call"] == "fail":
            events = scheduler.fail("it broke")
        else:
            events = scheduler.complete(self._runner.run(plan(scheduler.state, schedule)), call["now"])
        check_state(scheduler.state)
        return {**_schedule(schedule), "events": _events((*expired, *events))}


def replay(lines: Iterable[str]) -> Iterator[str]:
    """Make the calls of a recorded history again; the lines that must come of it."""
    lines = iter(lines)
    settings = json.loads(next(lines))
    player = Player(settings)
    yield _line(settings)
    for line in lines:
        call = json.loads(line)["call"]
        yield _line({"call": call, "came": player.obey(call)})


def record(settings: Json) -> Iterator[str]:
    """A history of `NUM_CALLS` random calls, then steps until nothing is left."""
    player = Player(settings)
    draw = random.Random(settings["seed"])
    yield _line(settings)
    number = 0
    while number < NUM_CALLS or player.scheduler.state.has_work:
        call: Json = {"call": "step"}
        if number < NUM_CALLS:
            call = _random_call(draw, number, settings["num_blocks"] * 4)
        call["now"] = float(number)
        number += 1
        yield _line({"call": call, "came": player.obey(call)})


def _random_call(draw: random.Random, number: int, capacity: int) -> Json:
    kind = draw.choices(("add", "step", "abort", "fail"), (14, 80, 5, 1))[0]
    if kind == "abort":
        return {"call": kind, "id": f"r{draw.randrange(number + 1)}"}
    if kind != "add":
        return {"call": kind}
    most = min(70, capacity - 1)
    shared = [*range(40)][: draw.choice((0, 0, 8, 24, 40))]
    prompt = (shared + [draw.randrange(VOCAB) for _ in range(draw.choice((1, 5, 12, 30)))])[: most // 2 + 1]
    return {
        "call": kind,
        "id": f"r{number}",
        "prompt": prompt,
        "max_tokens": min(draw.choice((1, 4, 12, 30)), most - len(prompt)) or 1,
        "priority": draw.choice((0, 0, -1, 1)),
        "deadline": None if draw.random() < 0.9 else float(number + draw.randrange(60)),
        "salt": draw.choice(("", "", "", "a")),
    }


def _request(call: Json) -> Request:
    return Request(
        id=RequestId(call["id"]),
        prompt=tuple(call["prompt"]),
        params=SamplingParams(max_tokens=call["max_tokens"], seed=0),
        arrival=call["now"],
        priority=call["priority"],
        deadline=call["deadline"],
        cache_salt=call["salt"],
    )


def _schedule(schedule: Schedule) -> Json:
    return {
        "runs": [[*run[:4]] for run in schedule.runs],
        "num_decodes": len(schedule.decodes),
        "admitted": schedule.admitted,
        "preempted": schedule.preempted,
        "left_out": {request_id: reason.value for request_id, reason in schedule.left_out},
        "queue": schedule.queue_reason and schedule.queue_reason.value,
    }


def _events(events: Iterable[Event]) -> list[list[object]]:
    return [
        [e.request_id, e.sampled.token, e.finish and e.finish.value, e.num_cached]
        if isinstance(e, TokenEvent)
        else [e.request_id, e.reason.value]
        for e in events
        if isinstance(e, TokenEvent | FinishEvent)
    ]


def _line(data: Json) -> str:
    return json.dumps(data, separators=(",", ":"))


def summary(lines: Iterable[str]) -> Counter[str]:
    """How often what happened: a history in which nothing happens proves nothing."""
    seen: Counter[str] = Counter()
    for line in list(lines)[1:]:
        came = json.loads(line)["came"]
        seen.update(came.get("left_out", {}).values())
        seen["steps"] += "runs" in came
        seen["preemptions"] += len(came.get("preempted", ()))
        starts = {run[0]: run[1] for run in came.get("runs", ())}
        seen["hits"] += sum(starts[request_id] > 0 for request_id in came.get("admitted", ()))
        seen.update(event[-1] for event in came.get("events", ()) if len(event) == 2)
    return seen


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, settings in SETTINGS.items():
        lines = list(record(settings))
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(name, dict(summary(lines)))


if __name__ == "__main__":
    main()
