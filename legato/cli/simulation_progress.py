"""How far a simulation is, told now and then."""

import time
from collections.abc import Callable

from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.engine.loop import is_last
from legato.metrics.journal import StepRecord

STEPS_BETWEEN_LOOKS = 256
"""At the clock."""


class SimulationProgress:
    """An observer of a simulated engine."""

    def __init__(
        self,
        num_requests: int,
        tell: Callable[[str], None],
        *,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` is called with a line about every `every_s` seconds."""
        self._num_requests, self._tell, self._every_s, self._clock = num_requests, tell, every_s, clock
        self._told = clock()
        self._num_steps = self._num_ended = 0

    def submitted(self, request: Request) -> None: ...

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:  # noqa: ARG002
        self._num_ended += 1

    def stepped(self, record: StepRecord) -> None:
        self._num_steps += 1
        self._num_ended += sum(map(is_last, record.events))
        if self._num_steps % STEPS_BETWEEN_LOOKS == 0 and self._clock() - self._told >= self._every_s:
            self._told = self._clock()
            self._tell(
                f"{self._num_ended:,} of {self._num_requests:,} requests ended, {self._num_steps:,} steps, "
                f"{record.ended:,.0f} s of simulated time"
            )
