"""The costs that an earlier start measured: used if they are whole and meant for this engine, else anew."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.config import EngineSettings
from legato.cost.step_cost import StepShape
from legato.engine import step_costs as costs_module
from legato.engine.cost_file import CostFile, Sample, read_cost_file, write_cost_file
from legato.engine.fake import FakeRunner
from legato.engine.scheduling import scheduler_config
from legato.engine.step_costs import step_costs
from legato.errors import ConfigError

CONFIG = scheduler_config(EngineSettings(tpot_target_ms=100.0), max_model_len=2048, vocab_size=250)
MEASURED = ((StepShape(1, 0, 100, 0, True), 0.02), (StepShape(0, 64, 0, 4096, False), 0.05))


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[CostFile, int]]:
    """The costs of an engine, and how often they were measured so far."""
    measured = []

    def calibrate(*_: object, **__: object) -> Any:
        measured.append(1)
        return MEASURED

    monkeypatch.setattr(costs_module, "calibrate", calibrate)
    source = tmp_path / "model.gguf"
    source.touch()

    def measure() -> tuple[CostFile, int]:
        costs = step_costs(
            FakeRunner(num_blocks=512, block_size=32, vocab_size=250),
            CONFIG,
            model="a-model",
            source=source,
            choices={"weights": "w16"},
            cache_dir=tmp_path / "cache",
        )
        return costs, len(measured)

    return measure


def the_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache" / "costs").iterdir()
    return file


def rewrite(file: Path, **change: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def slower(file: Path) -> None:
    costs = json.loads(file.read_text())
    for sample in costs["samples"]:
        sample["seconds"] *= 1000
    file.write_text(json.dumps(costs))


def to_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def other_model(file: Path) -> None:
    costs = read_cost_file(file)
    write_cost_file(file, costs.model_copy(update={"model": "another"}))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: os.truncate(file, 200),
    "zeroed": lambda file: file.write_bytes(bytes(500)),
    "inverted": lambda file: file.write_bytes(bytes(byte ^ 255 for byte in file.read_bytes())),
    "a thousand times slower": slower,
    "no digest": lambda file: rewrite(file, sha256=None),
    "no samples": lambda file: rewrite(file, samples=[]),
    "infinite": lambda file: file.write_text(file.read_text().replace("0.02", "1e999")),
    "negative": lambda file: file.write_text(file.read_text().replace("0.02", "-0.02")),
    "a number of 400 digits": lambda file: rewrite(file, num_blocks=10**400),
    "nested without end": lambda file: file.write_text("[" * 100_000),
    "another model's": other_model,
    "a directory": to_directory,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_costs_that_cannot_be_right_are_measured_anew(
    measure: Callable[[], tuple[CostFile, int]],
    damage: Callable[[Path], object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, count = measure()
    assert (measure()[1], count) == (1, 1)
    file = the_file(tmp_path)
    damage(file)
    assert not caplog.records
    again, count = measure()
    assert (again.samples, count) == (first.samples, 2)
    assert f"cost file {file}: " in caplog.records[0].message
    assert "measuring anew" in caplog.records[0].message
    if not file.is_dir():
        assert measure()[1] == 2
        assert the_file(tmp_path) == file


def test_a_disk_that_is_full_costs_only_time(
    measure: Callable[[], tuple[CostFile, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert measure()[0].samples == tuple(Sample(**s._asdict(), seconds=t) for s, t in MEASURED)
    assert "cannot be written (No space left on device)" in caplog.text
    assert list((tmp_path / "cache" / "costs").iterdir()) == []


@given(at=st.integers(0, 10_000), change=st.integers(1, 255), cut=st.booleans())
def test_no_change_of_a_number_is_overlooked(
    tmp_path_factory: pytest.TempPathFactory, at: int, change: int, cut: bool
) -> None:
    """A changed byte is noticed, unless it says the same (white space)."""
    file = tmp_path_factory.mktemp("costs") / "costs.json"
    samples = tuple(Sample(**shape._asdict(), seconds=seconds) for shape, seconds in MEASURED)
    whole = CostFile(
        model="m",
        measured_on={"machine": "x"},
        vocab_size=9,
        max_model_len=9,
        block_size=9,
        num_blocks=9,
        samples=samples,
    )
    write_cost_file(file, whole)
    content = bytearray(file.read_bytes())
    at %= len(content)
    if cut:
        del content[at:]
    else:
        content[at] ^= change
    file.write_bytes(content)
    try:
        read = read_cost_file(file)
    except ConfigError:
        pass
    else:
        assert read.model_copy(update={"sha256": None}) == whole


def test_costs_that_others_disturbed_are_used_once_and_not_kept(
    measure: Callable[[], tuple[CostFile, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps of one shape that take between one and four times as long say little of it."""
    disturbed = tuple((shape, seconds * factor) for factor in (1, 4, 2, 3) for shape, seconds in MEASURED)
    monkeypatch.setattr(costs_module, "calibrate", lambda *_, **__: disturbed)
    costs, _ = measure()
    assert len(costs.samples) == len(disturbed)
    assert not (tmp_path / "cache" / "costs").exists()
    assert "the next start measures anew" in caplog.text
