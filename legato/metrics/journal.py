"""The journal: one record for each step, written once; metrics, explanations and plots all read it."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from legato.core.events import Event
from legato.core.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step decided, did and took. Times are seconds on the engine's clock."""

    schedule: Schedule
    events: tuple[Event, ...]
    """What clients saw of it."""
    ended: float
    """When its events existed; `schedule.now` is when it began."""
    budget: int
    """The most tokens it could have held."""
    num_running: int
    """Sequences that hold blocks after the step."""
    num_waiting: int
    blocks_used: int
    blocks_total: int
    error: str | None = None
    """Why the model step failed."""

    @property
    def elapsed(self) -> float:
        return self.ended - self.schedule.now


class Journal:
    """The newest `capacity` step records, oldest first."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(tuple(self._records))
