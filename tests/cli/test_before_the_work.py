"""Wrong paths are told before the work, and a simulation tells how far it is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from legato.cli.files import check_writable, write
from legato.cli.simulation_progress import STEPS_BETWEEN_LOOKS, SimulationProgress
from legato.core.events import FinishEvent
from legato.core.lifecycle import FinishReason
from legato.core.request import RequestId
from legato.errors import ConfigError
from tests.cli.test_commands import legato


@pytest.mark.parametrize("name", ["no/such/file.html", "folder", "file/x.html"])
def test_files_that_cannot_be_written_are_found_out_without_a_trace(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    for check in (check_writable, lambda path: write(path, "")):
        with pytest.raises(ConfigError, match=f"{name}: cannot be written"):
            check(tmp_path / name)
    check_writable(None, tmp_path / "new.html", tmp_path / "file")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        *(("simulate --scenario growing", flag) for flag in ("--json", "--plot", "--journal")),
        *(
            ("tune --tpot-target-ms 100 --cost gemma3-270m", flag)
            for flag in ("--json", "--plot", "--cost-out")
        ),
        *((command, "--chat-template") for command in ("serve", "chat", "doctor")),
        ("serve", "--api-key-file"),
        ("serve", "--journal"),
    ],
)
def test_a_wrong_path_is_told_before_the_work(command: str, flag: str, tmp_path: Path) -> None:
    out = legato(*command.split(), flag, "no/such/file.jinja", cwd=tmp_path)
    assert (out.returncode, out.stdout) == (1, ""), out
    (line,) = out.stderr.splitlines()
    assert line.startswith("legato: error: ")
    assert "no/such/file.jinja" in line


def test_a_simulation_tells_how_far_it_is() -> None:
    told: list[str] = []
    now = 0.0
    progress = SimulationProgress(1000, told.append, every_s=2.0, clock=lambda: now)
    end = FinishEvent(RequestId("0"), FinishReason.LENGTH)
    record: Any = SimpleNamespace(events=(end,), ended=3600.0)
    for step in range(4 * STEPS_BETWEEN_LOOKS):
        now = step / STEPS_BETWEEN_LOOKS
        progress.stepped(record)
    progress.aborted(RequestId("1"), FinishReason.ABORT, 0.0)
    num = 3 * STEPS_BETWEEN_LOOKS
    assert told == [f"{num} of 1,000 requests ended, {num} steps, 3,600 s of simulated time"]
