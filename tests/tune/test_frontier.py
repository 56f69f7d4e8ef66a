"""What can be had together: against the obvious way to find it."""

import math

from hypothesis import given
from hypothesis import strategies as st

from legato.tune.frontier import Point, knee, pareto

POINTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=30)


def beats(one: Point, other: Point) -> bool:
    return one[0] <= other[0] and one[1] <= other[1] and one != other


@given(POINTS)
def test_the_front_is_what_nothing_beats(points: list[Point]) -> None:
    front = pareto(points)
    unbeaten = {p for p in points if not any(beats(other, p) for other in points)}
    assert {points[i] for i in front} == unbeaten
    assert len(front) == len(unbeaten)
    assert all(points[i] not in points[:i] for i in front)
    assert [points[i] for i in front] == sorted(unbeaten)


@given(POINTS.filter(bool), st.floats(0.01, 100), st.floats(0.01, 100))
def test_the_knee_is_the_farthest_below_the_chord_in_any_units(
    points: list[Point], x: float, y: float
) -> None:
    front = [points[i] for i in pareto(points)]
    found = knee(front)
    assert found == knee([(x * px, y * py) for px, py in front])
    if len(front) < 3:
        assert found is None
        return
    logs = [(math.log(px), math.log(py)) for px, py in front]
    (x0, y0), (x1, y1) = logs[0], logs[-1]
    below = [y0 + (px - x0) / (x1 - x0) * (y1 - y0) - py for px, py in logs]
    if found is None:
        assert max(below) < 1e-9
    else:
        assert below[found] > max(below) - 1e-9
        assert below[found] > 0


def test_a_bend_is_found_and_a_straight_line_has_none() -> None:
    assert knee([(1, 100), (2, 10), (100, 1)]) == 1
    assert knee([(1, 100), (10, 10), (100, 1)]) is None
    assert knee([(1, 100), (50, 90), (100, 1)]) is None
