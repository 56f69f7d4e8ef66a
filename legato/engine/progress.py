"""Progress reports for requests that asked for them: how far their prompts are, after each step that changed
it."""

from collections import deque

from legato.core.events import ProgressEvent
from legato.core.request import Request, RequestId
from legato.core.schedule import Schedule
from legato.core.sequence import Sequence
from legato.core.state import SchedulerState

RATE_OVER = 32
"""The prefill rate is measured over this many steps with chunks."""


class ProgressReports:
    """Follows requests from their submission to their first token. It costs nothing if no request asks for
    it."""

    def __init__(self) -> None:
        self._last: dict[RequestId, ProgressEvent | None] = {}
        """The last report to each request that is followed."""
        self._steps: deque[tuple[int, float]] = deque(maxlen=RATE_OVER)
        """Prompt tokens and seconds of the last steps with chunks."""

    def follow(self, request: Request) -> None:
        """Follow a request if it asked for it."""
        if request.wants_progress:
            self._last[request.id] = None

    def forget(self, request_id: RequestId) -> None:
        """Stop following a request that was aborted: perhaps no further step comes that would notice it."""
        self._last.pop(request_id, None)

    def report(self, state: SchedulerState, schedule: Schedule, now: float) -> tuple[ProgressEvent, ...]:
        """The changes after a step that ended at `now`.

        A prompt that got its first token is reported as fully computed, and then forgotten.
        """
        if schedule.chunks:
            self._steps.append((schedule.num_prefill_tokens, now - schedule.now))
        if not self._last:
            return ()
        events: list[ProgressEvent] = []
        ahead = state.tokens_ahead()
        positions = {request_id: position for position, request_id in enumerate(state.waiting)}
        seconds_per_token = self._seconds_per_token()
        for request_id, last in tuple(self._last.items()):
            sequence = state.get(request_id)
            event = None
            if sequence is not None:
                arrival = sequence.request.arrival
                ttft = None
                if seconds_per_token is not None:
                    ttft = now - arrival + ahead.get(request_id, 0) * seconds_per_token
                event = _progress(sequence, positions.get(request_id), ttft)
            if event is not None and not (last and _is_same(event, last)):
                events.append(event)
            self._last[request_id] = event
            if sequence is None or sequence.num_generated:
                del self._last[request_id]
        return tuple(events)

    def _seconds_per_token(self) -> float | None:
        """The mean over the last steps. None before the first step with chunks."""
        num_tokens, seconds = sum(num for num, _ in self._steps), sum(seconds for _, seconds in self._steps)
        return seconds / num_tokens if num_tokens else None


def _progress(sequence: Sequence, queue_position: int | None, ttft: float | None) -> ProgressEvent:
    num_prompt = len(sequence.request.prompt)
    return ProgressEvent(
        sequence.id,
        num_computed=min(sequence.num_computed, num_prompt),
        num_prompt=num_prompt,
        num_cached=sequence.num_cached,
        queue_position=queue_position,
        predicted_ttft=ttft,
    )


def _is_same(event: ProgressEvent, last: ProgressEvent) -> bool:
    """Whether nothing changed except the prediction, which changes in every step."""
    return event._replace(predicted_ttft=last.predicted_ttft) == last
