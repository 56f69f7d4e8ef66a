"""Least squares with non-negative coefficients, from sums over the samples (the normal equations).

A sample is a row of a few numbers. The coefficients are chosen so that the weighted sum of each row comes
close to 1. The code uses plain lists: the systems are so small that calling a library would take longer.
"""

import math
from collections.abc import Sequence

Sums = list[float]
"""The normal equations, flattened. For each number x of a row: the sums over the samples of x times every
number of the row, followed by the sum of x."""

RIDGE = 1e-9
"""Added to a diagonal of ones. Columns that are always proportional then share a coefficient."""


def sample_sums(row: Sequence[float], weight: float) -> Sums:
    """The sums of one sample. Add the sums of several samples number by number."""
    with_target = (*row, 1.0)
    return [weight * x * y for x in row for y in with_target]


def solve_nonnegative(sums: Sums, size: int) -> list[float]:
    """The `size` coefficients, none negative, with the smallest mean squared error.

    The most negative coefficient is fixed at 0 and the rest is solved again, until none is negative. Columns
    that no sample contains get 0. This is the first half of the method of Lawson and Hanson (1974), which
    hardly ever needs the second half.
    """
    rows = [sums[i * (size + 1) : (i + 1) * (size + 1)] for i in range(size)]
    free = [i for i in range(size) if rows[i][i] > 0]
    while free:
        # Scale the diagonal to 1, because the prices differ by many orders of magnitude.
        scales = [1 / math.sqrt(rows[i][i]) for i in free]
        system = [
            [rows[i][j] * by * other for j, other in zip(free, scales, strict=True)] + [rows[i][size] * by]
            for i, by in zip(free, scales, strict=True)
        ]
        solution = _solve(system)
        worst = min(range(len(free)), key=solution.__getitem__)
        if solution[worst] >= 0:
            coefficients = dict(zip(free, map(float.__mul__, solution, scales), strict=True))
            return [coefficients.get(i, 0.0) for i in range(size)]
        del free[worst]
    return [0.0] * size


def _solve(system: list[list[float]]) -> list[float]:
    """Gaussian elimination without pivoting, which positive definite matrices do not need.

    Each row ends with its right-hand side. `system` is overwritten.
    """
    size = len(system)
    for k, top in enumerate(system):
        top[k] += RIDGE
        for row in system[k + 1 :]:
            factor = row[k] / top[k]
            for j in range(k + 1, size + 1):
                row[j] -= factor * top[j]
    solution = [0.0] * size
    for k in reversed(range(size)):
        known = sum(system[k][j] * solution[j] for j in range(k + 1, size))
        solution[k] = (system[k][size] - known) / system[k][k]
    return solution
