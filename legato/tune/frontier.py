"""What can be had together: the points that no other point beats in both numbers, and where the bend is."""

import math
from collections.abc import Sequence

Point = tuple[float, float]
"""Of both numbers, less is better."""


def pareto(points: Sequence[Point]) -> list[int]:
    """Indices of the points that no other is at least as good as in both numbers and better in one.

    By the first number; of equal points the first one.
    """
    front: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front


def knee(points: Sequence[Point]) -> int | None:
    """Index of the point that is farthest from the straight line between the first and the last one, towards
    less, both axes logarithmic; None if no point is on that side of it.

    `points` are a Pareto front, all numbers above 0. Before the knee a little more of the first number saves
    much of the second; behind it a lot saves little.
    """
    if len(points) < 3:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in points]
    (x0, y0), (x1, y1) = logs[0], logs[-1]
    away = [(y0 - y1) * (x - x0) + (x1 - x0) * (y - y0) for x, y in logs]  # below the line if negative
    least = min(range(len(points)), key=away.__getitem__)
    return least if away[least] < -1e-12 else None
