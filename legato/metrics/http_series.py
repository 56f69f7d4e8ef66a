"""HTTP requests that were answered, and those that were refused, as Prometheus reads them.

Counted in the event loop's thread, read in any other.
"""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from legato.metrics.series import Catalogue

METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
NO_ROUTE = "none"
"""Of a request that was refused before it had a route, or for whose path there is none."""
REASONS = (
    "context_length_exceeded",
    "deadline_exceeded",
    "forbidden",
    "invalid_api_key",
    "invalid_request",
    "method_not_allowed",
    "model_not_found",
    "not_found",
    "queue_full",
    "request_too_large",
    "server_error",
    "unavailable",
    "unsupported_media_type",
)
"""Why requests are refused: each has its row from the start."""


class HttpSeries(Collector):
    """Names and labels of requests are those that vLLM has from its instrumentator."""

    def __init__(self) -> None:
        new = Catalogue()
        self._requests = new.counter(
            "http_requests_total",
            "HTTP requests that ended, by route, method and status.",
            ("handler", "method", "status"),
            (),
        )
        self._refusals = new.counter(
            "legato_refusals_total",
            "Requests that got an error instead of an answer, by reason.",
            ("reason",),
            [(reason,) for reason in REASONS],
        )

    def ended(self, *, route: str, method: str, status: int, refusal: str | None) -> None:
        """Count a request. `route` is one of the server's own paths, never what a client wrote; `refusal` is
        why it got no answer."""
        self._requests.count(route, method if method in METHODS else "other", str(status))
        if refusal is not None:
            self._refusals.count(refusal)

    def collect(self) -> Iterator[Metric]:
        for series in (self._requests, self._refusals):
            yield series.copy().export({})
