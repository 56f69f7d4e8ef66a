"""The page as `promtool check metrics` judges it: its rules for Legato's own names, and no NaN or Inf."""

import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from legato.core.block_pool import BlockPool
from legato.metrics.http_series import HttpSeries
from legato.metrics.process_series import ProcessSeries
from legato.metrics.prometheus import Metrics


@pytest.fixture
def page() -> str:
    metrics = Metrics(model_name="m", budget=64, blocks=BlockPool(8, 16))
    metrics.registry.register(HttpSeries())
    metrics.registry.register(ProcessSeries({"version": "1"}, lambda: (0.02, 1.5)))
    return metrics.render().decode()


def test_names_keep_the_rules_of_prometheus(page: str) -> None:
    own = [family for family in text_string_to_metric_families(page) if family.name.startswith("legato")]
    assert len(own) > 15
    for family in own:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name), "colons are for recording rules"
        assert family.documentation
        assert family.type != "unknown"
        words = family.name.split("_")
        assert not {"gauge", "counter", "histogram", "summary", family.type} & {*words}
        assert not {"ms", "milliseconds", "us", "minutes", "hours", "kb", "mb", "gb"} & {*words}
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            assert "quantile" not in sample.labels
            assert ("le" in sample.labels) == sample.name.endswith("_bucket")


def test_no_value_is_nan_or_infinite(page: str) -> None:
    values = [line.rsplit(" ", 1)[1] for line in page.splitlines() if line and line[0] != "#"]
    assert len(values) > 100
    assert not [value for value in values if "nan" in value.lower() or "inf" in value.lower()]


def test_the_process_its_build_and_its_event_loop_are_told(page: str) -> None:
    assert 'legato_build_info{version="1"} 1.0' in page
    assert "legato_event_loop_longest_turn_seconds 0.02" in page
    assert "legato_event_loop_busy_seconds_total 1.5" in page
    assert "process_open_fds" in page
    assert "process_resident_memory_bytes" in page


def test_promtool_has_nothing_against_our_own_names(page: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=page, text=True, capture_output=True, check=False
    )
    said = checked.stdout + checked.stderr
    assert not [line for line in said.splitlines() if "legato" in line]
