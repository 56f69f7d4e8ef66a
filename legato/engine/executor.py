"""Executes schedules on a runner."""

from legato.core.block_pool import BlockPool
from legato.core.plan import plan
from legato.core.schedule import Schedule
from legato.core.state import SchedulerState
from legato.core.step_plan import StepResult
from legato.engine.protocol import Runner


class RunnerExecutor:
    """Builds the plan of a schedule and runs it."""

    def __init__(self, runner: Runner, pool: BlockPool) -> None:
        """Raises ValueError if the scheduler's pool does not fit the runner's KV cache."""
        if pool.num_blocks > runner.num_blocks or pool.block_size != runner.block_size:
            raise ValueError(
                f"the pool has {pool.num_blocks} blocks of {pool.block_size} tokens, "
                f"the runner {runner.num_blocks} of {runner.block_size}"
            )
        self._runner = runner

    def execute(self, state: SchedulerState, schedule: Schedule) -> StepResult:
        return self._runner.run(plan(state, schedule))
