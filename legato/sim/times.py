"""How long simulated steps take, and the clock that they move."""

import random
from collections.abc import Sequence

from legato.cost.step_cost import StepCost, StepShape


class StepTimes:
    """Seconds of a step: as the prices say, times how far one measured step or another was off.

    Without `ratios` every step takes exactly what is predicted. The same seed gives the same times.
    """

    def __init__(self, cost: StepCost, ratios: Sequence[float] = (), *, seed: int = 0) -> None:
        """`ratios`: measured / predicted of real steps; each step draws one of them."""
        self._cost = cost
        self._ratios = tuple(ratios)
        self._draw = random.Random(seed)

    def __call__(self, shape: StepShape) -> float:
        seconds = self._cost.seconds(shape)
        if not self._ratios:
            return seconds
        return seconds * self._ratios[int(self._draw.random() * len(self._ratios))]


class SimulatedClock:
    """Stands still until somebody moves it on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
