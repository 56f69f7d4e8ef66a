"""The journal file: a line for each step, and a disk that may fill up."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from metrics_rig import make_world

from legato.errors import ConfigError
from legato.metrics.journal import JournalFile


def test_each_step_is_a_line_without_any_token(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    world = make_world(budget=8)
    with closing(JournalFile(file)) as journal:
        world.engine.observe(journal)
        world.submit("A", 10, max_tokens=2)
        world.submit("B", 3, max_tokens=1)
        world.run()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [8, 5, 1]
    assert lines[0]["chunks"] == [["A", 0, 8, False]]
    assert (lines[0]["left_out"], lines[0]["queue"]) == ({"B": "budget"}, None)
    assert lines[1]["chunks"] == [["A", 8, 2, True], ["B", 0, 3, True]]
    assert lines[2]["decodes"] == ["A"]
    assert [line["sampled"] for line in lines] == [[], ["A", "B"], ["A"]]
    assert all(line["model"] == 1.0 and line["elapsed"] >= 1.0 for line in lines)


def test_a_full_disk_ends_the_journal_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    world = make_world(budget=8)
    with closing(JournalFile(Path("/dev/full"))) as journal:
        world.engine.observe(journal)
        world.submit("A", 3, max_tokens=3)
        world.run()
    assert len(world.tokens["A"]) == 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "journal /dev/full ends at step 0" in caplog.text


def test_a_journal_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        JournalFile(tmp_path / "no" / "folder")
