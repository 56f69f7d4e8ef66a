"""Least squares without negative coefficients, from sums over the samples: the normal equations.

A sample is a row of a few numbers that, each times its coefficient, should add up to 1. Knows nothing of what
they mean. Plain lists: the systems are so small that a library's call would take longer.
"""

import math
from collections.abc import Sequence

Sums = list[float]
"""For each number x of a row, in turn: the sums over the samples of x times every number, then that of x."""

RIDGE = 1e-9
"""Added to a diagonal of ones: numbers that always move together share what is explained by them."""


def sample_sums(row: Sequence[float], weight: float) -> Sums:
    """The sums of one sample. Those of several are added, number by number."""
    ends = (*row, 1.0)
    return [weight * x * y for x in row for y in ends]


def solve_nonnegative(sums: Sums, size: int) -> list[float]:
    """The coefficients, none negative, whose samples come nearest to 1 in the mean of squares.

    What would be negative is fixed at 0, the worst first, and the rest solved again; so is what no sample
    has shown. This is the first half of Lawson and Hanson's method (1974), which hardly ever needs the other.
    """
    rows = [sums[i * (size + 1) : (i + 1) * (size + 1)] for i in range(size)]
    free = [i for i in range(size) if rows[i][i] > 0]
    while free:
        scales = [1 / math.sqrt(rows[i][i]) for i in free]  # prices differ by many powers of ten
        system = [
            [rows[i][j] * by * other for j, other in zip(free, scales, strict=True)] + [rows[i][size] * by]
            for i, by in zip(free, scales, strict=True)
        ]
        found = _solve(system)
        worst = min(range(len(free)), key=found.__getitem__)
        if found[worst] >= 0:
            coefficients = dict(zip(free, map(float.__mul__, found, scales), strict=True))
            return [coefficients.get(i, 0.0) for i in range(size)]
        del free[worst]
    return [0.0] * size


def _solve(system: list[list[float]]) -> list[float]:
    """Gauss's elimination; positive definite matrices need no pivots. Each row ends with its right side."""
    size = len(system)
    for k, top in enumerate(system):
        top[k] += RIDGE
        for row in system[k + 1 :]:
            factor = row[k] / top[k]
            for j in range(k + 1, size + 1):
                row[j] -= factor * top[j]
    found = [0.0] * size
    for k in reversed(range(size)):
        known = sum(system[k][j] * found[j] for j in range(k + 1, size))
        found[k] = (system[k][size] - known) / system[k][k]
    return found
