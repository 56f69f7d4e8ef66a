"""Counters, gauges and histograms, as plain numbers that can be copied in no time.

Kept here and not in the Prometheus library's own metric objects for two reasons: a step of many decodes costs
microseconds, and a scrape sees all of them as they were between two steps. The library writes the text.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Row = tuple[str, ...]
"""Values of a series' own labels."""


@dataclass(slots=True)
class Scalar:
    """A counter or a gauge: one number for each row of label values."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help: str
    labels: Row
    values: dict[Row, float]

    def add(self, amount: float, *row: str) -> None:
        self.values[row] += amount

    def count(self, *row: str) -> None:
        """Add one, to a row that may be new."""
        self.values[row] = self.values.get(row, 0.0) + 1

    def set(self, value: float, *row: str) -> None:
        self.values[row] = value

    def copy(self) -> "Scalar":
        return replace(self, values=self.values.copy())

    def export(self, common: Mapping[str, str]) -> Metric:
        family = self.family(self.name, self.help, labels=(*common, *self.labels))
        for row, value in self.values.items():
            family.add_metric((*common.values(), *row), value)
        return family


@dataclass(slots=True)
class Histogram:
    """Samples counted in buckets, for each row of label values. Bucket i is for bounds[i-1] < x <= bounds[i],
    one more for what is above all bounds."""

    name: str
    help: str
    bounds: tuple[float, ...]
    labels: Row
    counts: dict[Row, list[int]]
    sums: dict[Row, float]

    def observe(self, value: float | None, *row: str) -> None:
        """Count a sample; None, a formula that is not defined, is none."""
        if value is not None:
            self.counts[row][bisect_left(self.bounds, value)] += 1
            self.sums[row] += value

    def copy(self) -> "Histogram":
        counts = {row: buckets.copy() for row, buckets in self.counts.items()}
        return replace(self, counts=counts, sums=self.sums.copy())

    def export(self, common: Mapping[str, str]) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=(*common, *self.labels))
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for row, buckets in self.counts.items():
            cumulative = list(zip(bounds, accumulate(buckets), strict=True))
            family.add_metric((*common.values(), *row), cumulative, self.sums[row])
        return family


class Catalogue:
    """All series, in the order of the page. A row that is declared is exported from the start, as zero."""

    def __init__(self) -> None:
        self.series: list[Scalar | Histogram] = []

    def counter(self, name: str, help: str, labels: Row = (), rows: Iterable[Row] = ((),)) -> Scalar:
        return self._scalar(Scalar(CounterMetricFamily, name, help, labels, dict.fromkeys(rows, 0.0)))

    def gauge(self, name: str, help: str, labels: Row = (), rows: Iterable[Row] = ((),)) -> Scalar:
        return self._scalar(Scalar(GaugeMetricFamily, name, help, labels, dict.fromkeys(rows, 0.0)))

    def histogram(
        self,
        name: str,
        help: str,
        bounds: tuple[float, ...],
        labels: Row = (),
        rows: tuple[Row, ...] = ((),),
    ) -> Histogram:
        counts = {row: [0] * (len(bounds) + 1) for row in rows}
        histogram = Histogram(name, help, bounds, labels, counts, dict.fromkeys(rows, 0.0))
        self.series.append(histogram)
        return histogram

    def _scalar(self, scalar: Scalar) -> Scalar:
        self.series.append(scalar)
        return scalar
