"""Timelines of requests: when what happened to each, and the only formulas over these stamps.

`docs/metrics.md` has the same formulas in symbols. This file reads no clock and knows no exported name: its
stamps are those of the step records, seconds on the engine's clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from legato.core.events import ProgressEvent, PromptEvent, TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.core.schedule import Chunk, Schedule
from legato.metrics.journal import StepRecord

COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
LATE_GAPS = 0.01
"""Share of a reply's gaps that may exceed the target: the target is on their 99th percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a server aims at, for requests without targets of their own; seconds, None for no target."""

    ttft: float | None = None
    tpot: float | None = None

    def of(self, request: Request) -> "Targets":
        """Those of a request on a server that has these."""
        return Targets(ttft=request.ttft_target or self.ttft, tpot=request.tpot_target or self.tpot)


NO_TARGETS = Targets()


@dataclass(slots=True, kw_only=True, eq=False)
class RequestTimeline:
    """The stamps and counts of one request. Mutable, and changed by `Timelines` alone.

    A preemption takes nothing back: the stamps are those of the tokens that the client saw. A formula whose
    stamps do not exist (yet) is None.
    """

    request_id: RequestId
    num_prompt: int
    """Tokens in the prompt."""
    arrival: float
    targets: Targets = NO_TARGETS
    """Its own, or else the server's."""
    admitted: float | None = None
    """When the step began that took it out of the queue for the first time."""
    token_times: list[float] = field(default_factory=list, repr=False)
    """When each token of the reply existed: the end of its step."""
    finished: float | None = None
    reason: FinishReason | None = None
    num_preemptions: int = 0
    num_cached: int = 0
    """Prompt tokens that were found in the cache at the first admission."""
    num_chunks: int = 0
    """Steps that worked on the prompt before the first token, with those that a preemption undid."""
    num_computed: int = 0
    """Positions that were computed at least once."""

    @property
    def num_generated(self) -> int:
        return len(self.token_times)

    @property
    def first_token(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def last_token(self) -> float | None:
        return self.token_times[-1] if self.token_times else None

    @property
    def ttft(self) -> float | None:
        """Time to first token, the wait in the queue included."""
        return _between(self.arrival, self.first_token)

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: every gap between two tokens, `num_generated - 1` of them."""
        return tuple(self.gap_before(i) for i in range(1, len(self.token_times)))

    def gap_before(self, index: int) -> float:
        """The seconds between token `index` and the one before it; negative indices count from the end."""
        return self.token_times[index] - self.token_times[index - 1]

    @property
    def tpot(self) -> float | None:
        """Time per output token: the mean gap. None for a reply of less than two tokens."""
        decode_time = self.decode_time
        if decode_time is None or self.num_generated < 2:
            return None
        return decode_time / (self.num_generated - 1)

    @property
    def met_ttft(self) -> bool | None:
        """Whether the first token came in time. None without a target or a token."""
        ttft, target = self.ttft, self.targets.ttft
        return None if ttft is None or target is None else ttft <= target

    def is_late(self, index: int) -> bool:
        """Whether the gap before token `index` exceeds the target."""
        return self.targets.tpot is not None and self.gap_before(index) > self.targets.tpot

    @property
    def met_tpot(self) -> bool | None:
        """Whether the gaps keep to the target, but for one in a hundred. None without a target or a gap."""
        num_gaps = self.num_generated - 1
        if self.targets.tpot is None or num_gaps < 1:
            return None
        return sum(map(self.is_late, range(1, self.num_generated))) <= LATE_GAPS * num_gaps

    @property
    def met_targets(self) -> bool | None:
        """Whether a request that ended counts for goodput: it is complete and missed none of its targets.

        None without targets, and for one that its client aborted.
        """
        if self.targets == NO_TARGETS or self.reason in (None, FinishReason.ABORT):
            return None
        return self.reason in COMPLETE and False not in (self.met_ttft, self.met_tpot)

    @property
    def e2e(self) -> float | None:
        """End to end: arrival to finish. The finish is the last token, unless it was ended from outside."""
        return _between(self.arrival, self.finished)

    @property
    def queue_time(self) -> float | None:
        """Arrival to first admission. `queue_time + prefill_time` is `ttft`."""
        return _between(self.arrival, self.admitted)

    @property
    def prefill_time(self) -> float | None:
        """First admission to first token; a preemption in between is part of it."""
        return _between(self.admitted, self.first_token)

    @property
    def decode_time(self) -> float | None:
        """First to last token; a preemption in between is part of it."""
        return _between(self.first_token, self.last_token)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChanges:
    """What one step did to the timelines."""

    admitted: tuple[RequestTimeline, ...]
    """Left the queue for the first time."""
    started: tuple[RequestTimeline, ...]
    """Got their first token."""
    gaps: tuple[float, ...]
    """One for each token that is not a first one: the seconds since the token before it."""
    num_judged: int
    """Gaps of requests with a target for them."""
    num_late: int
    """Those of them that exceed it."""
    finished: tuple[RequestTimeline, ...]
    """Ended; nobody else keeps these timelines."""
    recomputed: int
    """Positions that were computed before, and lost in a preemption."""


class Timelines:
    """The timelines of all living requests. Told what an observer is told; forgets a request as it ends.

    A request that is not known (any more) is ignored: an aborted one may still be in the step in flight.
    """

    def __init__(self, targets: Targets = NO_TARGETS) -> None:
        """`targets` are those of the server."""
        self._targets = targets
        self._living: dict[RequestId, RequestTimeline] = {}
        self._running: set[RequestId] = set()

    @property
    def num_running(self) -> int:
        """Living requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Living requests in the queue, new and preempted ones."""
        return len(self._living) - len(self._running)

    def submitted(self, request: Request) -> None:
        self._living[request.id] = RequestTimeline(
            request_id=request.id,
            num_prompt=len(request.prompt),
            arrival=request.arrival,
            targets=self._targets.of(request),
        )

    def stepped(self, record: StepRecord) -> StepChanges:
        """Absorb a step; a failed step computed nothing."""
        self._preempt(record.schedule)
        admitted = self._admit(record.schedule)
        recomputed = 0 if record.error is not None else self._compute(record.schedule.runs)
        now = record.ended
        started: list[RequestTimeline] = []
        gaps: list[float] = []
        num_judged = num_late = 0
        finished: list[RequestTimeline] = []
        for event in record.events:
            timeline = self._living.get(event.request_id)
            if timeline is None or isinstance(event, PromptEvent | ProgressEvent):
                continue
            if isinstance(event, TokenEvent):
                reason = event.finish
                if timeline.token_times:
                    gap = now - timeline.token_times[-1]
                    gaps.append(gap)
                    if timeline.targets.tpot is not None:
                        num_judged += 1
                        num_late += gap > timeline.targets.tpot
                else:
                    started.append(timeline)
                timeline.token_times.append(now)
            else:
                reason = event.reason
            if reason is not None:
                self._end(timeline, reason, now)
                finished.append(timeline)
        return StepChanges(
            admitted=admitted,
            started=tuple(started),
            gaps=tuple(gaps),
            num_judged=num_judged,
            num_late=num_late,
            finished=tuple(finished),
            recomputed=recomputed,
        )

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> RequestTimeline | None:
        """The finished timeline of a request that was ended from outside; None if it is not known."""
        timeline = self._living.get(request_id)
        if timeline is not None:
            self._end(timeline, reason, now)
        return timeline

    def _preempt(self, schedule: Schedule) -> None:
        for request_id in schedule.preempted:
            timeline = self._living.get(request_id)
            if timeline is not None:
                timeline.num_preemptions += 1
                self._running.discard(request_id)

    def _admit(self, schedule: Schedule) -> tuple[RequestTimeline, ...]:
        """Those admitted for the first time; one that comes back from a preemption keeps its stamp."""
        first: list[RequestTimeline] = []
        starts = {chunk.request_id: chunk.start for chunk in schedule.chunks} if schedule.admitted else {}
        for request_id in schedule.admitted:
            timeline = self._living.get(request_id)
            if timeline is None:
                continue
            self._running.add(request_id)
            if timeline.admitted is None:
                timeline.admitted = schedule.now
                timeline.num_cached = starts[request_id]
                first.append(timeline)
        return tuple(first)

    def _compute(self, runs: Iterable[Chunk]) -> int:
        """Note what was computed; how many positions of it were computed before."""
        recomputed = 0
        for request_id, start, length, *_ in runs:
            timeline = self._living.get(request_id)
            if timeline is None:
                continue
            if not timeline.token_times:
                timeline.num_chunks += 1
            end = start + length
            if start < timeline.num_computed:
                recomputed += min(end, timeline.num_computed) - start
            if end > timeline.num_computed:
                timeline.num_computed = end
        return recomputed

    def _end(self, timeline: RequestTimeline, reason: FinishReason, now: float) -> None:
        timeline.finished, timeline.reason = now, reason
        del self._living[timeline.request_id]
        self._running.discard(timeline.request_id)
