"""How far prompts are, for requests that asked: told after each step that changed it."""

from legato.core.events import ProgressEvent
from legato.core.request import Request, RequestId
from legato.core.scheduler import Scheduler
from legato.core.sequence import Sequence


class ProgressReports:
    """Follows requests from their submission to their first token. Costs nothing while nobody asks."""

    def __init__(self) -> None:
        self._last: dict[RequestId, ProgressEvent | None] = {}
        """What was told last to each request that is followed."""

    def follow(self, request: Request) -> None:
        """Only if it wants that."""
        if request.wants_progress:
            self._last[request.id] = None

    def report(self, scheduler: Scheduler) -> tuple[ProgressEvent, ...]:
        """What is new since the last report. A prompt that got its first token is told to be computed in
        full; one that ended is forgotten."""
        events: list[ProgressEvent] = []
        for request_id, last in tuple(self._last.items()):
            sequence = scheduler.running.get(request_id) or scheduler.waiting.get(request_id)
            event = None if sequence is None else _progress(sequence, scheduler)
            if event is not None and event != last:
                events.append(event)
            self._last[request_id] = event
            if sequence is None or sequence.num_generated:
                del self._last[request_id]
        return tuple(events)


def _progress(sequence: Sequence, scheduler: Scheduler) -> ProgressEvent:
    num_prompt = len(sequence.request.prompt)
    return ProgressEvent(
        sequence.id,
        num_computed=min(sequence.num_computed, num_prompt),
        num_prompt=num_prompt,
        num_cached=sequence.num_cached,
        queue_place=scheduler.waiting.place(sequence.id) if sequence.id in scheduler.waiting else None,
    )
