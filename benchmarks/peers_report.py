"""Samples of a comparison -> medians, ranges and ratios, as a table and as data. Measures nothing."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.measurements import MEASUREMENTS, Metric

METRICS = {metric.key: metric for measurement in MEASUREMENTS for metric in measurement.metrics}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number of one server in one repeat."""

    server: str
    repeat: int
    key: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    median: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric: the spread of each server, and how many times better the first server is than each peer.

    A ratio is taken within a repeat, where both servers met the same machine; above 1 the first is better.
    """

    metric: Metric
    spreads: Mapping[str, Spread]
    ratios: Mapping[str, Spread]


def rows_of(samples: Sequence[Sample], servers: Sequence[str]) -> list[Row]:
    """One row for each metric that was measured. The first of `servers` is compared with the others."""
    rows = []
    for key, metric in METRICS.items():
        by_server = {
            name: {
                sample.repeat: sample.value
                for sample in samples
                if (sample.server, sample.key) == (name, key)
            }
            for name in servers
        }
        measured = {name: values for name, values in by_server.items() if values}
        if not measured:
            continue
        rows.append(
            Row(
                metric=metric,
                spreads={name: spread_of(list(values.values())) for name, values in measured.items()},
                ratios=_ratios(metric, measured, servers[0]),
            )
        )
    return rows


def _ratios(metric: Metric, measured: Mapping[str, Mapping[int, float]], first: str) -> dict[str, Spread]:
    own = measured.get(first, {})
    ratios = {}
    for name, values in measured.items():
        both = [repeat for repeat in values if repeat in own] if name != first else []
        if both:
            higher, lower = (own, values) if metric.more_is_better else (values, own)
            ratios[name] = spread_of([higher[repeat] / lower[repeat] for repeat in both])
    return ratios


def table_of(rows: Sequence[Row], servers: Sequence[str]) -> Table:
    """Servers side by side: the median, its range, and how much better the first server is."""
    table = Table(title=f"median, min..max, x: {servers[0]} is that many times better", show_lines=True)
    table.add_column("")
    for name in servers:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [_cell(row.spreads.get(name), row.ratios.get(name)) for name in servers]
        table.add_row(f"{row.metric.title}\n{row.metric.unit}", *cells)
    return table


def _cell(spread: Spread | None, ratio: Spread | None) -> str:
    if spread is None:
        return "-"
    text = f"{_number(spread.median)}\n{_number(spread.low)}..{_number(spread.high)}"
    return text if ratio is None else f"{text}\nx{ratio.median:.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
