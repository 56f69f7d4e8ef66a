"""Recorded histories make the same schedules again, byte for byte: the net below every refactoring.

If a change of decisions is meant, record anew (`python scripts/histories.py`) and say so in the commit.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "histories.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("histories", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["histories"] = module
    spec.loader.exec_module(module)
    return module


histories = load()


@pytest.mark.parametrize("name", histories.SETTINGS)
def test_a_recorded_history_replays_to_the_same_bytes(name: str) -> None:
    recorded = (histories.FOLDER / f"{name}.jsonl").read_text()
    assert "\n".join(histories.replay(recorded.splitlines())) + "\n" == recorded


def test_the_histories_hold_everything_that_can_happen() -> None:
    lines = [(histories.FOLDER / f"{name}.jsonl").read_text().splitlines() for name in histories.SETTINGS]
    seen = sum((histories.summary(one) for one in lines), start=histories.Counter())
    for what in ("hits", "preemptions", "blocks", "budget", "prefix", "partial", "timeout", "abort", "error"):
        assert seen[what] >= 3, what


@pytest.mark.parametrize("name", histories.SETTINGS)
@pytest.mark.parametrize("seed", range(100, 104))
def test_other_histories_keep_the_law_and_end(name: str, seed: int) -> None:
    lines = list(histories.record({**histories.SETTINGS[name], "seed": seed}))
    assert list(histories.replay(lines)) == lines
