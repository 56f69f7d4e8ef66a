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

    def forget(self, request_id: RequestId) -> None:
        """It was aborted, and perhaps no step will come to notice."""
        self._last.pop(request_id, None)

    def report(self, scheduler: Scheduler, schedule: Schedule, now: float) -> tuple[ProgressEvent, ...]:
        """What is new after a step that ended `now`. A prompt that got its first token is told to be computed
        in full; one that ended is forgotten."""
        if schedule.chunks:
            self._steps.append((schedule.num_prefill_tokens, now - schedule.now))
        if not self._last:
            return ()
        events: list[ProgressEvent] = []
        ahead = scheduler.state.tokens_ahead()
        places = {request_id: place for place, request_id in enumerate(scheduler.state.waiting)}
        pace = self._seconds_a_token()
        for request_id, last in tuple(self._last.items()):
            sequence = scheduler.state.running.get(request_id) or scheduler.state.waiting.get(request_id)
            event = None
            if sequence is not None:
                arrival = sequence.request.arrival
                ttft = None if pace is None else now - arrival + ahead.get(request_id, 0) * pace
                event = _progress(sequence, places.get(request_id), ttft)
            if event is not None and not (last and _is_same(event, last)):
                events.append(event)
            self._last[request_id] = event
            if sequence is None or sequence.num_generated:
                del self._last[request_id]
        return tuple(events)

    def _seconds_a_token(self) -> float | None:
        """Over the last steps; None before the first that worked on a prompt."""
        num_tokens, seconds = sum(num for num, _ in self._steps), sum(seconds for _, seconds in self._steps)
        return seconds / num_tokens if num_tokens else None


def _progress(sequence: Sequence, place: int | None, ttft: float | None) -> ProgressEvent:
    num_prompt = len(sequence.request.prompt)
    return ProgressEvent(
        sequence.id,
        num_computed=min(sequence.num_computed, num_prompt),
        num_prompt=num_prompt,
        num_cached=sequence.num_cached,
        queue_position=place,
        predicted_ttft=ttft,
    )


def _is_same(event: ProgressEvent, last: ProgressEvent) -> bool:
    """But for the prediction, which changes with every step."""
    return event._replace(predicted_ttft=last.predicted_ttft) == last
