"""`legato simulate` and `legato serve --simulate`, end to end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import openai
import pytest
from typer.testing import CliRunner, Result

from legato.cli.commands import app
from legato.cost.step_cost import StepCost, StepShape
from legato.engine.cost_file import CostFile, Sample, write_cost_file
from legato.errors import ConfigError

TRACE = "timestamp,input_length,output_length\n" + "".join(f"{i / 2},{200 * i + 50},20\n" for i in range(12))
HASHED = '{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2]}\n'
STEP_S = 0.04


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


@pytest.fixture
def cost_file(tmp_path: Path) -> Path:
    """Steps of 40 ms, and 1 ms more for each prompt token."""
    cost = StepCost(step=STEP_S, head=0, decode=0, prefill=0.001, context=0, pair=0)
    shapes = [
        StepShape(decodes, prefill, decodes * context, (2 * context + prefill) * prefill, True)
        for decodes in (0, 1, 8)
        for prefill in (0, 32, 128, 512)
        for context in (100, 2000)
        if decodes + prefill
    ]
    samples = tuple(Sample(**s._asdict(), seconds=cost.seconds(s)) for s in shapes * 5)
    path = tmp_path / "cost.json"
    write_cost_file(
        path,
        CostFile(
            model="some-model",
            measured_on={"machine": "an abacus"},
            vocab_size=50_000,
            max_model_len=4096,
            block_size=16,
            num_blocks=1024,
            samples=samples,
        ),
    )
    return path


def test_a_trace_with_everything_written(tmp_path: Path, cost_file: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    out = simulate(
        *("--trace", str(tmp_path / "trace.csv"), "--cost", str(cost_file), "--tpot-target-ms", "120"),
        *("--length-scale", "0.5", "--time-scale", "2", "--limit", "10", "--duration", "5", "--seed", "4"),
        *(
            "--json",
            str(tmp_path / "o.json"),
            "--plot",
            str(tmp_path / "o.html"),
            "--journal",
            str(tmp_path / "j"),
        ),
    )
    assert out.exit_code == 0
    assert "10 of 10 requests complete" in out.stdout
    assert "some-model on an abacus" in out.stderr
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["engine"]["tpot_target_ms"] == 120
    assert document["result"]["num_requests"] == 10
    assert document["result"]["latencies"]["itl"]["p99"] <= 0.13
    records = [json.loads(line) for line in (tmp_path / "j").read_text().splitlines()]
    assert len(records) == document["result"]["num_steps"]
    assert {record["limit"] for record in records} >= {"target"}
    assert "<svg" in (tmp_path / "o.html").read_text()


def test_settings_of_the_engine_apply(cost_file: Path) -> None:
    """The worst gap follows the budget: 40 ms, and 1 ms for each prompt token, as far as they are learned."""
    for budget in (64, 256):
        out = simulate(
            *("--scenario", "stall", "--cost", str(cost_file), "--max-batch-tokens", str(budget)),
            *("--max-running", "9", "--num-blocks", "400", "--policy", "fcfs", "--no-noise"),
            *("--tpot-target-ms", "0"),
        )
        row = next(line for line in out.stdout.splitlines() if line.startswith("gap between tokens"))
        assert float(row.split()[-1].replace(",", "")) == pytest.approx(40 + budget - 8, rel=0.12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --trace, --scenario and --prompt"),
        (["--scenario", "stall", "--prompt", "3", "--output", "2"], "give one of"),
        (["--scenario", "nonsense"], "no scenario 'nonsense'"),
        (["--trace", "none.csv"], "none.csv: cannot be read"),
        (["--prompt", "3", "--output", "4"], "need a --rate"),
        (["--prompt", "3", "--rate", "4"], "go together"),
        (["--scenario", "stall", "--start", "99"], "no request is left"),
        (["--scenario", "stall", "--cost", "none.json"], "none.json: cannot be read"),
        (["--scenario", "stall", "--cost", "none"], "no costs 'none'; give one of gemma3-270m"),
        (["--scenario", "stall", "--rate", "0"], "rate must be above 0"),
        (["--scenario", "stall", "--json", "no/such/folder"], "no/such/folder: cannot be written"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate(*arguments)
    assert message in caught.value.message


def test_lengths_without_times_need_a_rate_and_a_rate_replaces_times(tmp_path: Path) -> None:
    lengths, hashed = tmp_path / "lengths.csv", tmp_path / "hashed.jsonl"
    lengths.write_text("input_length,output_length\n" + "50,5\n" * 20)
    hashed.write_text(HASHED * 20)
    with pytest.raises(ConfigError, match="has no times"):
        simulate("--trace", str(lengths))
    for trace in (lengths, hashed):
        out = simulate("--trace", str(trace), "--rate", "10", "--burstiness", "inf")
        assert "20 of 20 requests complete" in out.stdout
    assert "50 of 50" in simulate("--rate", "10", "--prompt", "40", "--output", "3", "--duration", "5").stdout


@pytest.fixture
def url(cost_file: Path, tmp_path: Path) -> Iterator[str]:
    """A simulated server, as a process."""
    command = [sys.executable, "-c", "from legato.cli.main import run; run()", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--simulate", str(cost_file), "--max-running", "2", "--served-model-name", "pretended"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "simulated" in line, process.stderr and process.stderr.read()
    yield line.split()[4]
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_simulated_server_answers_the_official_client_at_the_pace_of_its_costs(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        times = []
        stream = client.completions.create(
            model="pretended", prompt="Once", max_tokens=20, stream=True, extra_body={"ignore_eos": True}
        )
        for chunk in stream:
            times.append(time.monotonic())
            assert chunk.choices[0].text.encode().isascii()
        gaps = sorted(later - earlier for earlier, later in pairwise(times))
        assert 0.9 * STEP_S < gaps[len(gaps) // 2] < 1.5 * STEP_S
        messages = [{"role": "user", "content": "hello"}]
        answers = [
            client.chat.completions.create(model="pretended", messages=messages, max_tokens=8)  # type: ignore[call-overload]
            for _ in range(2)
        ]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content != ""
        ids = client.completions.create(model="pretended", prompt=[49_999, 3], max_tokens=1)
        assert ids.usage is not None
        assert ids.usage.prompt_tokens == 2
    assert "some-model on an abacus" in httpx.get(f"{url}/version").json()["simulated"]
    assert "vllm:time_to_first_token_seconds" in httpx.get(f"{url}/metrics").text


def test_a_simulated_server_loads_no_model_library() -> None:
    code = (
        "import sys, legato.cli.serve, legato.cli.simulate, legato.sim.stand_in\n"
        "print(*sorted({'torch', 'numba', 'transformers'} & set(sys.modules)))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []
