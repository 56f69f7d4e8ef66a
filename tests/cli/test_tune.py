"""`legato tune`, end to end."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from legato.cli.commands import app
from legato.cost.step_cost import StepCost, StepShape
from legato.engine.cost_file import CostFile, Sample, read_cost_file, write_cost_file
from legato.errors import ConfigError

TRACE = "timestamp,input_length,output_length\n" + "".join(
    f"{i / 2},{80 * (i % 5) + 50},20\n" for i in range(30)
)


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments], catch_exceptions=False)


@pytest.fixture
def cost_file(tmp_path: Path) -> Path:
    """Steps of 20 ms, and half a ms more for each prompt token."""
    cost = StepCost(step=0.02, head=0, decode=0, prefill=0.0005, context=0, pair=0)
    shapes = [
        StepShape(decodes, prefill, decodes * 100, (200 + prefill) * prefill, True)
        for decodes in (0, 1, 8)
        for prefill in (0, 32, 128, 512)
        if decodes + prefill
    ]
    path = tmp_path / "cost.json"
    write_cost_file(
        path,
        CostFile(
            model="some-model",
            measured_on={"machine": "an abacus"},
            vocab_size=50_000,
            max_model_len=2048,
            block_size=32,
            num_blocks=1024,
            samples=tuple(Sample(**s._asdict(), seconds=cost.seconds(s)) for s in shapes * 5),
        ),
    )
    return path


def test_a_trace_with_everything_written(tmp_path: Path, cost_file: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    given = ["--trace", str(tmp_path / "trace.csv"), "--cost", str(cost_file), "--tpot-target-ms", "100"]
    given += ["--ttft-target-ms", "2000", "--max-steps", "12000", "--admission", "strict"]
    written = ["--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.html")]
    out = tune("some/model", *given, *written, "--cost-out", str(tmp_path / "costs.json"))
    assert out.exit_code == 0
    assert "some-model on an abacus" in out.stderr
    assert out.stdout.startswith("Recommended: ")
    command = shlex.split(out.stdout.splitlines()[-1])
    assert command[:3] == ["legato", "serve", "some/model"]
    assert command[-2:] == ["--admission", "strict"]
    document = json.loads((tmp_path / "o.json").read_text())
    assert shlex.split(document["command"]) == command
    assert document["verification"] is None
    assert document["tuning"]["targets"] == {"tpot": 0.1, "ttft": 2.0}
    assert document["tuning"]["best"]["good"] > 0.9
    assert "<svg" in (tmp_path / "o.html").read_text()
    assert read_cost_file(tmp_path / "costs.json") == read_cost_file(cost_file)
    again = tune("some/model", *given)
    assert again.stdout == out.stdout


def test_a_rate_and_the_scenario_that_is_the_default(cost_file: Path) -> None:
    common = ("--cost", str(cost_file), "--tpot-target-ms", "100", "--max-steps", "4000")
    beat = ("--rate", "2", "--burstiness", "inf", "--prompt", "60", "--output", "5", "--limit", "20")
    assert "(as it is: 2)" in tune(*common, *beat).stdout
    assert " of 72 requests" in tune(*common, "--no-noise").stdout  # of two minutes, chat and documents


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tpot-target-ms", "0"], "tune needs a --tpot-target-ms"),
        (["--tpot-target-ms", "100", "--scenario", "nonsense"], "no scenario 'nonsense'"),
        (["--tpot-target-ms", "100", "--cost", "none.json"], "none.json: cannot be read"),
        (["--tpot-target-ms", "100", "--prompt", "3"], "go together"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tune("gemma3-270m", *arguments)
    assert message in caught.value.message


def test_what_is_recommended_is_served_by_the_real_engine(gemma_path: Path, tmp_path: Path) -> None:
    out = tune(
        *(str(gemma_path), "--cost", "gemma3-270m", "--tpot-target-ms", "150", "--max-steps", "1000"),
        *("--rate", "5", "--prompt", "40", "--output", "8", "--limit", "8", "--verify"),
        *("--json", str(tmp_path / "o.json"), "--kv-memory", "200MB"),
    )
    assert "8 requests in 2 s, in real time" in out.stdout
    verification = json.loads((tmp_path / "o.json").read_text())["verification"]
    rows = verification["rows"]
    assert [row["name"] for row in rows][::3] == ["time to first token, p50", "gap between tokens, p99"]
    assert all(row["measured"] > 0 for row in rows)
    assert verification["pace"] > 0
