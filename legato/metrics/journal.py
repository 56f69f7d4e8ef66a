"""The journal: one record for each step, made once; metrics, files and explanations all read it."""

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from legato.core.events import Event, TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.core.schedule import Schedule
from legato.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step decided, did and took. Times are seconds on the engine's clock."""

    schedule: Schedule
    events: tuple[Event, ...]
    """What clients saw of it."""
    ended: float
    """When its events existed; `schedule.now` is when it began."""
    model_time: float
    """Seconds that the runner measured; the rest of the step is ours. 0 if it failed."""
    num_running: int
    """Sequences that hold blocks after the step."""
    num_waiting: int
    blocks_used: int
    blocks_cached: int
    """Of the others, those whose content may still be shared."""
    blocks_total: int
    error: str | None = None
    """Why the model step failed."""

    @property
    def elapsed(self) -> float:
        return self.ended - self.schedule.now

    @property
    def prediction_error(self) -> float | None:
        """|elapsed / predicted - 1|. None for a failed step, and where nothing was predicted."""
        predicted = self.schedule.predicted
        return abs(self.elapsed / predicted - 1) if predicted and self.error is None else None

    def to_json(self) -> dict[str, object]:
        """The record in plain values: numbers and request ids, never a token."""
        schedule = self.schedule
        return {
            "step": schedule.step,
            "start": schedule.now,
            "elapsed": self.elapsed,
            "model": self.model_time,
            "tokens": schedule.num_tokens,
            "budget": schedule.token_budget,
            "limit": schedule.limited_by.value,
            "target": schedule.target,
            "predicted": schedule.predicted,
            "margin": schedule.margin,
            "decodes": [run.request_id for run in schedule.decodes],
            "chunks": [[run.request_id, run.start, run.length, run.is_last] for run in schedule.chunks],
            "admitted": schedule.admitted,
            "preempted": schedule.preempted,
            "left_out": {request_id: reason.value for request_id, reason in schedule.left_out},
            "queue": None if schedule.queue_reason is None else schedule.queue_reason.value,
            "sampled": [event.request_id for event in self.events if isinstance(event, TokenEvent)],
            "running": self.num_running,
            "waiting": self.num_waiting,
            "blocks_used": self.blocks_used,
            "blocks_cached": self.blocks_cached,
            "blocks_total": self.blocks_total,
            "error": self.error,
        }


class JournalFile:
    """Writes each step's record as a line of JSON. An observer of an engine."""

    def __init__(self, path: Path) -> None:
        """Starts the file anew. Raises `ConfigError` if it cannot be written.

        A disk that fills up later ends the journal and nothing else.
        """
        self._full = False
        try:
            self._file = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"journal {path}: cannot be written ({error.strerror})") from error

    def submitted(self, request: Request) -> None:
        """Requests are seen when they run."""

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:
        """An abort shows as the request's absence from later steps."""

    def stepped(self, record: StepRecord) -> None:
        if self._full:
            return
        try:
            self._file.write(json.dumps(record.to_json(), separators=(",", ":")) + "\n")
        except OSError as error:
            self._full = True
            logger.error("journal %s ends at step %d: %s", self._file.name, record.schedule.step, error)

    def close(self) -> None:
        with suppress(OSError):  # a full disk, of which `stepped` has told
            self._file.close()
