"""The protocols of runners, executors and observers."""

from typing import Protocol

from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.core.schedule import Schedule
from legato.core.state import SchedulerState
from legato.core.step_plan import StepPlan, StepResult
from legato.metrics.journal import StepRecord


class Runner(Protocol):
    """Computes steps. It sees plans and never the scheduler. Calls come from one thread, one at a time."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks in its KV cache."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Store K and V of every token in the batch, and sample one token for each row of `plan.sample`.

        It may raise. Then the sequences of the plan are lost, and the next call is a new step.
        """
        ...


class Executor(Protocol):
    """Executes a schedule that was just committed."""

    def execute(self, state: SchedulerState, schedule: Schedule) -> StepResult:
        """The result of the step. It may raise, as `Runner.run` may."""
        ...


class Observer(Protocol):
    """Is called in the engine's thread. It must be fast and must not raise."""

    def submitted(self, request: Request) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None: ...
