"""A log line when decodes alone take longer than their target, and one when they no longer do."""

import logging

from legato.core.budget import LimitedBy
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.cost.step_cost import shape_of
from legato.metrics.journal import StepRecord

logger = logging.getLogger(__name__)

QUIET_S = 60.0
"""Between two lines, at least: a target that is only just missed comes and goes from step to step."""


class TargetLog:
    """An observer of an engine."""

    def __init__(self) -> None:
        self._unreachable = False
        """As of the last line."""
        self._told: float | None = None
        """When that was."""

    def submitted(self, request: Request) -> None:
        """Targets show when their requests decode."""

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:
        """The next step tells."""

    def stepped(self, record: StepRecord) -> None:
        schedule = record.schedule
        unreachable = schedule.limited_by is LimitedBy.UNREACHABLE
        if schedule.target is None or schedule.cost is None or unreachable == self._unreachable:
            return
        if self._told is not None and record.ended - self._told < QUIET_S:
            return
        self._unreachable, self._told = unreachable, record.ended
        alone = schedule.cost.seconds(shape_of((run.start, 1, True) for run in schedule.decodes))
        logger.log(
            logging.WARNING if unreachable else logging.INFO,
            "%d decodes take %.1f ms, target %.1f ms: %s",
            len(schedule.decodes),
            1000 * alone,
            1000 * schedule.target,
            "no budget can keep it; fewer at once (max_running) or a looser target would"
            if unreachable
            else "it is within reach again",
        )
