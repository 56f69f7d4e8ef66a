"""One log line every few seconds of work: what the engine did since the last one. Silent when idle."""

import logging

from legato.core.events import TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.metrics.journal import StepRecord

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class ThroughputLog:
    """An observer of an engine."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._prefilled = self._generated = 0

    def submitted(self, request: Request) -> None:
        """Requests show when they run."""

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:
        """An abort shows in the next line's counts."""

    def stepped(self, record: StepRecord) -> None:
        if self._since is None:
            self._since = record.schedule.now
            self._prefilled = self._generated = 0
        if record.error is None:
            self._prefilled += record.schedule.num_prefill_tokens
        self._generated += sum(isinstance(event, TokenEvent) for event in record.events)
        elapsed = record.ended - self._since
        if elapsed >= INTERVAL_S:
            logger.info(
                "prefilled %.1f tokens/s, generated %.1f tokens/s, running %d, waiting %d, "
                "KV cache %.1f %% used",
                self._prefilled / elapsed,
                self._generated / elapsed,
                record.num_running,
                record.num_waiting,
                100 * record.blocks_used / record.blocks_total,
            )
        if elapsed >= INTERVAL_S or not (record.num_running or record.num_waiting):
            self._since = None  # what was too short to tell of is forgotten
