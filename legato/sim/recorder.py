"""What is kept of a simulation: columns of numbers for its steps, timelines of its requests."""

from array import array
from dataclasses import dataclass, field

from legato.core.budget import LimitedBy
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.metrics.journal import StepRecord
from legato.metrics.timeline import RequestTimeline, Targets, Timelines

LIMITS = tuple(LimitedBy)
_NUMBER_OF = {limit: number for number, limit in enumerate(LIMITS)}


def _floats() -> "array[float]":
    return array("d")


def _counts() -> "array[int]":
    return array("q")


@dataclass(frozen=True, slots=True)
class Steps:
    """A column for each number; row i is step i. Times in seconds."""

    start: "array[float]" = field(default_factory=_floats)
    elapsed: "array[float]" = field(default_factory=_floats)
    num_decodes: "array[int]" = field(default_factory=_counts)
    num_prefill: "array[int]" = field(default_factory=_counts)
    """Tokens in chunks."""
    limit: "array[int]" = field(default_factory=_counts)
    """Index in `LIMITS`: what bounded the prompts."""
    num_running: "array[int]" = field(default_factory=_counts)
    num_waiting: "array[int]" = field(default_factory=_counts)
    blocks_used: "array[int]" = field(default_factory=_counts)

    def __len__(self) -> int:
        return len(self.start)


class Recorder:
    """An observer of an engine."""

    def __init__(self, targets: Targets) -> None:
        """`targets` are the server's, for requests without their own."""
        self.steps = Steps()
        self.ended: list[RequestTimeline] = []
        self.num_preemptions = 0
        self._timelines = Timelines(targets)

    def submitted(self, request: Request) -> None:
        self._timelines.submitted(request)

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:
        timeline = self._timelines.aborted(request_id, reason, now)
        if timeline is not None:
            self.ended.append(timeline)

    def stepped(self, record: StepRecord) -> None:
        schedule, steps = record.schedule, self.steps
        steps.start.append(schedule.now)
        steps.elapsed.append(record.ended - schedule.now)
        steps.num_decodes.append(len(schedule.decodes))
        steps.num_prefill.append(schedule.num_prefill_tokens)
        steps.limit.append(_NUMBER_OF[schedule.limited_by])
        steps.num_running.append(record.num_running)
        steps.num_waiting.append(record.num_waiting)
        steps.blocks_used.append(record.blocks_used)
        self.num_preemptions += len(schedule.preempted)
        self.ended += self._timelines.stepped(record).finished
