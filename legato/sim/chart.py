"""Charts as SVG, and the page around them: no script, no outside file. Knows nothing of what is drawn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 960, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 28, 36
COLOURS = ("#3b82d0", "#d1622b", "#3f8f4f", "#9a6bc5", "#9c7d41")

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --box: #f4f4f2; --axis: #bbb; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #181818; --box: #252525; --axis: #555; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
body { color: var(--ink); background: var(--paper); }
pre { background: var(--box); padding: 1rem; overflow-x: auto; font-size: 13px; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: var(--ink); }
.axis { stroke: var(--axis); stroke-width: 1; } .mark { stroke: #c22; stroke-dasharray: 6 4; }
.ring { stroke: var(--ink); stroke-width: 1.5; }
"""

Points = Sequence[tuple[float, float]]
"""By x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line, or the area below it."""

    name: str
    points: Points
    filled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series over one pair of axes, which start at 0."""

    title: str
    x: str
    """What the x axis shows, with its unit."""
    y: str
    series: tuple[Series, ...]
    marks: tuple[tuple[str, float], ...] = ()
    """Names and heights of lines across."""

    def svg(self) -> str:
        """The drawing."""
        points = [point for series in self.series for point in series.points]
        x_ticks = ticks(max((x for x, _ in points), default=1.0))
        y_ticks = ticks(max([y for _, y in points] + [height for _, height in self.marks], default=1.0))
        body = "".join(self._parts(x_ticks, y_ticks))
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(self.title)}</title>{body}</svg>'
        )

    def _parts(self, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> Iterator[str]:
        def at(x: float, y: float) -> tuple[float, float]:
            across = LEFT + x / x_ticks[-1] * (WIDTH - LEFT - RIGHT)
            down = HEIGHT - BOTTOM - y / y_ticks[-1] * (HEIGHT - TOP - BOTTOM)
            return round(across, 1), round(down, 1)

        left, bottom = at(0, 0)
        right, top = at(x_ticks[-1], y_ticks[-1])
        for tick in y_ticks:
            height = at(0, tick)[1]
            yield f'<line class="axis" x1="{left}" x2="{right}" y1="{height}" y2="{height}"/>'
            yield f'<text x="{left - 6}" y="{height + 4}" text-anchor="end">{tick:g}</text>'
        for tick in x_ticks:
            yield f'<text x="{at(tick, 0)[0]}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
        yield f'<text x="{right}" y="{bottom + 32}" text-anchor="end">{escape(self.x)}</text>'
        yield f'<text x="{left}" y="{top - 12}">{escape(self.y)}</text>'
        for number, series in enumerate(self.series):
            colour = COLOURS[number % len(COLOURS)]
            line = " ".join(f"{x},{y}" for x, y in (at(*point) for point in series.points))
            if series.filled and series.points:
                first, last = at(series.points[0][0], 0), at(series.points[-1][0], 0)
                area = f"{first[0]},{bottom} {line} {last[0]},{bottom}"
                yield f'<polygon points="{area}" fill="{colour}" fill-opacity="0.35"/>'
            yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            name_at = left + 200 + 170 * number
            yield f'<text x="{name_at}" y="{top - 12}" fill="{colour}">{escape(series.name)}</text>'
        for name, y in self.marks:
            height = at(0, y)[1]
            yield f'<line class="mark" x1="{left}" x2="{right}" y1="{height}" y2="{height}"/>'
            yield f'<text x="{right}" y="{height - 4}" text-anchor="end" fill="#c22">{escape(name)}</text>'


def ticks(greatest: float) -> list[float]:
    """Round numbers from 0 to `greatest` or a little above it."""
    if not greatest > 0:
        return [0.0, 1.0]
    rough = greatest / 5
    power = 10.0 ** floor(log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))
    return [step * i for i in range(ceil(greatest / step * (1 - 1e-9)) + 1)]


def cumulative(values: Sequence[float], most: int = 400) -> Points:
    """(value, percent of the values that are not above it), thinned out to about `most` points."""
    ordered = sorted(values)
    num = len(ordered)
    every = max(num // most, 1)
    chosen = [*range(0, num, every), num - 1] if num else []
    return [(ordered[i], 100 * (i + 1) / num) for i in chosen]


def over_time(times: Sequence[float], values: Sequence[float], *, worst: bool, most: int = 400) -> Points:
    """Values by equal spans of time, `most` of them: the greatest of each or the mean."""
    if not times:
        return []
    span = (max(times) or 1.0) / most
    groups: dict[int, list[float]] = {}
    for time, value in zip(times, values, strict=True):
        groups.setdefault(min(int(time / span), most - 1), []).append(value)
    return [
        ((number + 0.5) * span, max(group) if worst else sum(group) / len(group))
        for number, group in sorted(groups.items())
    ]


def page(title: str, text: str, charts: Sequence[Chart]) -> str:
    """A whole HTML file: a heading, a text of fixed width, the charts."""
    drawings = "".join(f"<h2>{escape(chart.title)}</h2>{chart.svg()}" for chart in charts)
    return document(title, f"<pre>{escape(text)}</pre>{drawings}")


def document(title: str, body: str) -> str:
    """A whole HTML file: a heading, and `body`, which is HTML. Readable on a bright and on a dark screen."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )
