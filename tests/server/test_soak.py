"""The soak, for seconds and without a model: it runs, the server stands it, and it sees faults."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "scripts" / "soak"


COSTS = Path(__file__).parents[2] / "legato" / "sim" / "costs" / "gemma3-270m.json"


def test_a_short_soak_of_the_simulated_server_finds_nothing(tmp_path: Path) -> None:
    costs = json.loads(COSTS.read_text())
    for sample in costs["samples"]:
        sample["seconds"] /= 20
    (tmp_path / "fast.json").write_text(json.dumps(costs))
    command = [sys.executable, str(FOLDER / "soak.py"), "--seconds", "3", "--rate", "3"]
    command += ["--max-gap", "1000", "--max-turn", "60"]  # a suite measures no time
    served = ["--", "--simulate", str(tmp_path / "fast.json"), "--num-blocks", "256"]
    out = subprocess.run([*command, *served], capture_output=True, text=True, timeout=120, check=False)
    report: dict[str, Any] = json.loads(out.stdout)
    assert report["faults"] == []
    assert out.returncode == 0
    assert report["requests"] > 5


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import figures
    import visitors
    import wire

    return figures, visitors, wire


def test_growth_is_that_of_the_last_two_thirds_and_noise_is_none(parts: Any) -> None:
    figures, *_ = parts
    rng = random.Random(1)
    warm = [(float(at), 10.0 * at) for at in range(30)]
    assert figures.growth([*warm, *((float(at), 300.0) for at in range(30, 90))]) == 0
    noisy = [(float(at), 300 + rng.uniform(-5, 5)) for at in range(90)]
    assert abs(figures.growth(noisy)) < 3
    leaking = [(float(at), 300 + at + rng.uniform(-5, 5)) for at in range(90)]
    assert 55 < figures.growth(leaking) < 65
    assert figures.growth([(0.0, 1.0)]) == 0


def test_memory_and_files_of_a_process_are_read(parts: Any) -> None:
    figures, *_ = parts
    before = figures.num_files(os.getpid())
    with FOLDER.joinpath("wire.py").open():
        assert figures.num_files(os.getpid()) == before + 1
    assert 10 < figures.resident_mib(os.getpid()) < 100_000
    assert os.getpid() in figures.process_tree(os.getppid())


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"stream": True}, b"data: {}\n\n"),
        ({"stream": True}, b'data: {"error":{"code":"deadline_exceeded"}}\n\n'),
        ({"n": 2}, b'{"choices": [{}]}'),
        ({"prompt": ["a", "b"]}, b'{"choices": [{}]}'),
        ({"response_format": {}}, b'{"choices": [{"finish_reason": "stop", "text": "{"}]}'),
    ],
)
def test_an_answer_that_is_not_whole_is_a_fault(parts: Any, body: dict[str, object], answer: bytes) -> None:
    _, visitors, wire = parts
    with pytest.raises((visitors.WrongAnswerError, ValueError)):
        visitors.check_complete(wire.Answer(200, answer), body)


def test_chunks_are_joined_and_what_is_no_answer_has_no_status(parts: Any) -> None:
    *_, wire = parts
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert wire.parse(chunked) == wire.Answer(200, b"abcde")
    assert wire.parse(b"") == wire.Answer(0, b"")
