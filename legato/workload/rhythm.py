"""When requests come, if no trace says it: a rate, and how evenly.

The gaps are drawn from a Gamma distribution, as `vllm bench serve` draws them: its shape is the burstiness.
1 is a Poisson process, less comes in bursts, more is more even, infinity is a fixed beat.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from legato.errors import ConfigError
from legato.workload.arrival import Arrival

HIGHEST = 1e9
"""Requests a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Requests a second; infinity: all at once."""

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}", param=name)
        if HIGHEST < self.rate < math.inf:
            raise ConfigError(f"rate must be at most {HIGHEST:g} or inf, not {self.rate:g}", param="rate")

    def times(self, num: int, draw: random.Random) -> list[float]:
        """When `num` requests come, the first at 0.

        Stretched so that they take exactly num / rate seconds with the gap after the last: the rate is what
        was asked for in a short run too.
        """
        if num == 0 or math.isinf(self.rate):
            return [0.0] * num
        if math.isinf(self.burstiness):
            return [i / self.rate for i in range(num)]
        gaps = [draw.gammavariate(self.burstiness, 1.0) for _ in range(num)]
        if not any(gaps):  # bursts so short that no float holds them
            return [0.0] * num
        stretch = num / self.rate / math.fsum(gaps)
        return [0.0, *accumulate(gap * stretch for gap in gaps[:-1])]


def retime(arrivals: Iterable[Arrival], rhythm: Rhythm, seed: int) -> tuple[Arrival, ...]:
    """The same requests in the same order, in another rhythm."""
    arrivals = tuple(arrivals)
    times = rhythm.times(len(arrivals), random.Random(seed))
    return tuple(replace(arrival, time=time) for arrival, time in zip(arrivals, times, strict=True))
