"""The benchmark of the HTTP side runs and measures what it says. Its figures belong to a quiet machine."""

from benchmarks.http import WARM, measure


def test_the_latency_that_http_adds_is_measured_for_every_token() -> None:
    result = measure(streams=8, step_ms=5.0, tokens=30)
    assert result.tokens == 8 * (30 - WARM)
    assert 0 < result.added_p50_ms <= result.added_p99_ms <= result.added_worst_ms
    assert 0 < result.cpu_http_us_per_token < 10_000
    assert 0 < result.http_share < 1
