"""What the engine needs of a runner, and of anyone who watches it."""

from typing import Protocol

from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.core.step_plan import StepPlan, StepResult
from legato.metrics.journal import StepRecord


class Runner(Protocol):
    """Computes steps. It sees plans and never the scheduler; calls come from one thread, one at a time."""

    @property
    def num_blocks(self) -> int:
        """Blocks in its KV cache."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Store K and V of every token in the batch and draw one token for each row of `plan.sample`.

        It may raise; the sequences of the plan are lost then, and the next call is a new step.
        """
        ...


class Observer(Protocol):
    """Is told, in the engine's thread, what happened. Must be quick and must not raise."""

    def submitted(self, request: Request) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None: ...
