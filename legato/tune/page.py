"""A tuning as a page: the frontier as SVG, every trial in a table. No script, no outside file."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from legato.sim.chart import BOTTOM, COLOURS, LEFT, RIGHT, TOP, WIDTH, document
from legato.tune.trial import Trial
from legato.tune.tuning import Tuning
from legato.tune.words import ms, numbers

HEIGHT = 420
ROOM = 1.15
"""Factor between the outermost points and the edges."""
KINDS = ("the target", "another target", "fixed budgets", "no chunking")
DIGITS = ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9))
ENOUGH_TICKS = 4
LEAST_S = 1e-4
"""What is less is drawn here: an axis of logarithms has no 0."""
TABLE_STYLE = (
    "<style>table { border-collapse: collapse; font-size: 13px; } td, th { padding: 2px 10px; } "
    "td + td { text-align: right; white-space: nowrap; } .front td { font-weight: 600; }</style>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Logarithmic, in milliseconds."""

    low: float
    high: float
    start: float
    """Where `low` is drawn."""
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten; more of them where that leaves few."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in DIGITS:
            ticks = [digit * 10.0**power for power in powers for digit in digits]
            inside = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(inside) >= ENOUGH_TICKS:
                break
        return inside


Measure = Callable[[Trial], float]
"""Seconds."""
CHARTS: tuple[tuple[str, str, Measure, Measure], ...] = (
    ("p99", "longest gap of a reply, p99", lambda trial: trial.stall("p99"), lambda trial: trial.ttft("p99")),
    ("p50", "longest gap of a reply, p99", lambda trial: trial.stall("p99"), lambda trial: trial.ttft("p50")),
    ("p99", "gap between tokens, p99", lambda trial: trial.gap("p99"), lambda trial: trial.ttft("p99")),
)
"""What of the time to first token, against what; the frontier is that of the first one."""


def page(tuning: Tuning, title: str, text: str) -> str:
    """Self-contained HTML; `text` goes above the charts."""
    charts = "".join(_chart(tuning, which, against, x_of, y_of) for which, against, x_of, y_of in CHARTS)
    return document(title, f"{TABLE_STYLE}<pre>{escape(text)}</pre>{charts}{_table(tuning)}")


def kind(tuning: Tuning, trial: Trial) -> int:
    """Index in `KINDS`."""
    if trial.setup.prefill_chunk == 0:
        return 3
    if not trial.setup.tpot_target_ms:
        return 2
    return int(trial.setup.tpot_target_ms != tuning.bench.engine.tpot_target_ms)


def _chart(tuning: Tuning, which: str, against: str, x_of: Measure, y_of: Measure) -> str:
    trials = [trial for trial in tuning.found.trials if math.isfinite(trial.ttft("p99"))]
    target = tuning.bench.targets.tpot or LEAST_S
    x = _axis([*(_milliseconds(x_of(trial)) for trial in trials), 1000 * target], LEFT, WIDTH - RIGHT)
    y = _axis([_milliseconds(y_of(trial)) for trial in trials], HEIGHT - BOTTOM, TOP)

    def place(trial: Trial) -> tuple[float, float]:
        return x.at(_milliseconds(x_of(trial))), y.at(_milliseconds(y_of(trial)))

    title = f"Time to first token, {which}, against the {against}"
    parts = [*_grid(x, y, f"{against}, ms"), *_marks(tuning, x, y)]
    if against == CHARTS[0][1]:
        line = " ".join(f"{at[0]},{at[1]}" for at in map(place, tuning.front))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[0]}" stroke-opacity="0.5"/>')
    parts += [_dot(tuning, trial, *place(trial)) for trial in trials]
    for trial, name in _named(tuning):
        across, down = place(trial)
        parts.append(f'<circle class="ring" cx="{across}" cy="{down}" r="9" fill="none"/>')
        side, away = ("end", -13) if across > WIDTH / 2 else ("start", 13)
        parts.append(f'<text x="{across + away}" y="{down - 8}" text-anchor="{side}">{name}</text>')
    for number, name in enumerate(KINDS):
        fill = COLOURS[number]
        parts.append(f'<text x="{LEFT + 330 + 150 * number}" y="{TOP - 12}" fill="{fill}">{name}</text>')
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{title}</title>{"".join(parts)}</svg>'
    return f"<h2>{title}</h2>{drawing}"


def _milliseconds(seconds: float) -> float:
    return 1000 * max(seconds, LEAST_S)


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    return Axis(low=min(values) / ROOM, high=max(values) * ROOM, start=start, end=end)


def _grid(x: Axis, y: Axis, below: str) -> Iterator[str]:
    for tick in y.ticks():
        yield f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{y.at(tick)}" y2="{y.at(tick)}"/>'
        yield f'<text x="{x.start - 6}" y="{y.at(tick) + 4}" text-anchor="end">{tick:g}</text>'
    for tick in x.ticks():
        yield f'<line class="axis" x1="{x.at(tick)}" x2="{x.at(tick)}" y1="{y.start}" y2="{y.end}"/>'
        yield f'<text x="{x.at(tick)}" y="{y.start + 16}" text-anchor="middle">{tick:g}</text>'
    yield f'<text x="{x.end}" y="{y.start + 32}" text-anchor="end">{below}</text>'
    yield f'<text x="{x.start}" y="{TOP - 12}">time to first token, ms</text>'


def _marks(tuning: Tuning, x: Axis, y: Axis) -> Iterator[str]:
    targets = tuning.bench.targets
    if targets.tpot is not None:
        at = x.at(1000 * targets.tpot)
        yield f'<line class="mark" x1="{at}" x2="{at}" y1="{y.start}" y2="{y.end}"/>'
        yield f'<text x="{at - 4}" y="{y.end + 12}" text-anchor="end" fill="#c22">target</text>'
    if targets.ttft is not None and y.low <= 1000 * targets.ttft <= y.high:
        at = y.at(1000 * targets.ttft)
        yield f'<line class="mark" x1="{x.start}" x2="{x.end}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{x.end}" y="{at - 4}" text-anchor="end" fill="#c22">target</text>'


def _named(tuning: Tuning) -> Iterator[tuple[Trial, str]]:
    """Trials that have a name, or several."""
    named = [(tuning.best, "recommended"), (tuning.no_chunking, "no chunking")]
    if tuning.knee is not None:
        named.insert(1, (tuning.knee, "knee"))
    for setup, trial in {trial.setup: trial for trial, _ in named}.items():
        yield trial, ", ".join(name for one, name in named if one.setup == setup)


def _dot(tuning: Tuning, trial: Trial, x: float, y: float) -> str:
    colour = COLOURS[kind(tuning, trial)]
    hint = escape(f"{trial.setup.in_words()}: {numbers(trial)}")
    return f'<circle cx="{x}" cy="{y}" r="4.5" fill="{colour}"><title>{hint}</title></circle>'


def _table(tuning: Tuning) -> str:
    head = (
        "settings",
        "good",
        "first token p50",
        "p99",
        "gap p50",
        "p99",
        "longest of a reply p99",
        "longest",
    )
    marks = {trial.setup: "frontier" for trial in tuning.front}
    marks |= {trial.setup: name for trial, name in _named(tuning)}
    rows = []
    for trial in sorted(tuning.found.trials, key=lambda trial: (trial.stall("p99"), trial.ttft("p99"))):
        cells = [escape(trial.setup.in_words()), f"{trial.good:.1%}"]
        cells += [ms(trial.ttft("p50")), ms(trial.ttft("p99"))]
        cells += [ms(trial.gap("p50")), ms(trial.gap("p99")), ms(trial.stall("p99"))]
        cells += [ms(trial.gap("max")), marks.get(trial.setup, "")]
        front = ' class="front"' if trial.setup in marks else ""
        rows.append(f"<tr{front}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = "".join(f"<th>{name}</th>" for name in (*head, ""))
    return f"<h2>All trials</h2><table><tr>{heads}</tr>{''.join(rows)}</table>"
