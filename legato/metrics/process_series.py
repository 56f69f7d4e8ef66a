"""The exported series about the process: what runs, what it takes, how long turns of its event loop are."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ProcessSeries(Collector):
    """Read when a page is made."""

    def __init__(self, build: Mapping[str, str], turns: Callable[[], tuple[float, float]]) -> None:
        """`turns` tells the seconds of the longest turn and of all together."""
        self._build = dict(build)
        self._turns = turns
        self._process = ProcessCollector(registry=CollectorRegistry())

    def collect(self) -> Iterator[Metric]:
        longest, busy = self._turns()
        info = GaugeMetricFamily("legato_build_info", "What runs, as labels.", labels=tuple(self._build))
        info.add_metric(tuple(self._build.values()), 1)
        yield info
        yield GaugeMetricFamily(
            "legato_event_loop_longest_turn_seconds",
            "Longest turn of the event loop since the start.",
            value=longest,
        )
        yield CounterMetricFamily(
            "legato_event_loop_busy_seconds_total", "All turns of the event loop together.", value=busy
        )
        yield from self._process.collect()
