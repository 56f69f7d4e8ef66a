"""How far prompts are, for requests that asked: told after each step that changed it."""

from collections import deque

from legato.core.events import ProgressEvent
from legato.core.request import Request, RequestId
from legato.core.schedule import Schedule
from legato.core.scheduler import Scheduler
from legato.core.sequence import Sequence

PACE_OVER = 32
"""Steps with chunks over which it is measured how fast prompts are read."""


class ProgressReports:
    """Follows requests from their submission to their first token. Costs nothing while nobody asks."""

    def __init__(self) -> None:
        self._last: dict[RequestId, ProgressEvent | None] = {}
        """What was told last to each request that is followed."""
        self._steps: deque[tuple[int, float]] = deque(maxlen=PACE_OVER)
        """Prompt tokens and seconds."""

    def follow(self, request: Request) -> None:
        """Only if it wants that."""
        if request.wants_progress:
            self._last[request.id] = None

    def report(self, scheduler: Scheduler, schedule: Schedule, now: float) -> tuple[ProgressEvent, ...]:
        """What is new after a step that ended `now`. A prompt that got its first token is told to be computed
        in full; one that ended is forgotten."""
        if schedule.chunks:
            self._steps.append((schedule.num_prefill_tokens, now - schedule.now))
        events: list[ProgressEvent] = []
        for request_id, last in tuple(self._last.items()):
            sequence = scheduler.running.get(request_id) or scheduler.waiting.get(request_id)
            event = None if sequence is None else self._progress(sequence, scheduler, now)
            if event is not None and not (last and _is_same(event, last)):
                events.append(event)
            self._last[request_id] = event
            if sequence is None or sequence.num_generated:
                del self._last[request_id]
        return tuple(events)

    def _progress(self, sequence: Sequence, scheduler: Scheduler, now: float) -> ProgressEvent:
        request = sequence.request
        predicted = None
        if self._steps:
            num_tokens, seconds = map(sum, zip(*self._steps, strict=True))
            left = 0 if sequence.num_generated else scheduler.num_ahead(sequence)
            predicted = now - request.arrival + left * seconds / num_tokens
        return ProgressEvent(
            sequence.id,
            num_computed=min(sequence.num_computed, len(request.prompt)),
            num_prompt=len(request.prompt),
            num_cached=sequence.num_cached,
            queue_place=scheduler.waiting.place(sequence.id) if sequence.id in scheduler.waiting else None,
            predicted_ttft=predicted,
        )


def _is_same(event: ProgressEvent, last: ProgressEvent) -> bool:
    """But for the prediction, which changes with every step."""
    return event._replace(predicted_ttft=last.predicted_ttft) == last
