"""What is measured before the first request: the time of a step of the engine, and of nothing else."""

import pytest

from legato.config import EngineSettings
from legato.core.step_plan import StepPlan, StepResult
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepCost
from legato.engine.calibration import calibrate, engine_seconds
from legato.engine.fake import FakeRunner
from legato.engine.scheduling import scheduler_config

TRUE = StepCost(step=0.02, head=0.0, decode=1e-3, prefill=5e-4, context=0.0, pair=0.0)
CONFIG = scheduler_config(EngineSettings(tpot_target_ms=100.0), max_model_len=2048, vocab_size=250)


class Machine:
    """A fake runner on a clock of its own; the steps `held_up` take `by` more."""

    def __init__(self, *, held_up: frozenset[int] = frozenset(), by: float = 0.0) -> None:
        self.now, self.num_steps = 0.0, 0
        self.held_up, self.by = held_up, by
        self.num_blocks, self.block_size = 512, 32
        self._runner = FakeRunner(num_blocks=512, block_size=32, vocab_size=250)

    def run(self, plan: StepPlan) -> StepResult:
        seconds = TRUE.seconds(plan.shape) + self.by * (self.num_steps in self.held_up)
        self.num_steps += 1
        self.now += seconds
        return StepResult(self._runner.run(plan).sampled, seconds)

    def clock(self) -> float:
        return self.now

    def slow_clock(self) -> float:
        """A clock that takes a millisecond to read. From one step's end to the next an engine reads it twice,
        and who calls it once."""
        self.now += 0.001
        return self.now


def test_what_the_engine_takes_between_two_steps_is_part_of_a_step() -> None:
    machine = Machine()
    own = engine_seconds(machine, CONFIG, clock=machine.slow_clock, max_seconds=10.0)
    assert own == pytest.approx(0.003, abs=1e-9)
    samples = calibrate(machine, CONFIG, max_seconds=60.0, clock=machine.slow_clock)
    for shape, seconds in samples:
        assert seconds == pytest.approx(TRUE.seconds(shape) + 0.001 + own, abs=1e-9)
    still = Machine()
    assert engine_seconds(still, CONFIG, clock=still.clock, max_seconds=10.0) == pytest.approx(0.0, abs=1e-9)


def test_a_cache_without_room_for_an_engine_is_calibrated_all_the_same() -> None:
    machine = Machine()
    machine.num_blocks, machine.block_size = 2, 1
    assert engine_seconds(machine, CONFIG, clock=machine.clock, max_seconds=1.0) == 0.0


def test_steps_that_were_held_up_are_left_out() -> None:
    """The process was stopped for five seconds, twice."""
    machine = Machine(held_up=frozenset({45, 60}), by=5.0)
    samples = calibrate(machine, CONFIG, max_seconds=60.0, clock=machine.clock)
    assert machine.num_steps > 60
    assert max(seconds / TRUE.seconds(shape) for shape, seconds in samples) < 1.5
    assert CostModel(samples).margin < 1.1
