"""Workloads that nobody can simulate are refused in one line, before any work."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from legato.cli import tune as cli_tune
from legato.cli.commands import app
from legato.errors import ConfigError
from legato.sim import run

HEADER = "timestamp,input_length,output_length\n"
RATE = ["--rate", "1", "--prompt", "10", "--output", "5"]


def refusal(monkeypatch: pytest.MonkeyPatch, *arguments: str, command: str = "simulate") -> str:
    """The message of the `ConfigError`. Nothing is simulated or loaded, whatever the arguments say."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(run, "simulate", work)
    monkeypatch.setattr(cli_tune, "_build", work)
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, [command, *arguments], catch_exceptions=False)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{HEADER}0,1e300,5\n", "line 2: input_length must be at most 10,000,000 tokens, not 1e+300"),
        (f"{HEADER}0,5,1e18\n", "line 2: output_length must be at most 10,000,000 tokens, not 1e+18"),
        (f"{HEADER}0,-5,5\n", "line 2: input_length must be a number of at least 0, not '-5'"),
        (f"{HEADER}0,nan,5\n", "line 2: input_length must be a number of at least 0, not 'nan'"),
        (f"{HEADER}1e308,5,5\n", "line 2: timestamp must be at most 1e+12, not 1e+308"),
        (f"{HEADER}0,5\n", "line 2: output_length is missing"),
        (f'{HEADER}0,5,"{"9" * 200_000}"\n', "not CSV (field larger than field limit (131072))"),
        ('{"timestamp":0,"input_length":1' + "0" * 5000 + "}", "line 1: not JSON (Exceeds the limit"),
        (
            '{"timestamp":0,"input_length":1' + "0" * 400 + "}",
            "line 1: input_length must be a number of at least",
        ),
        ('{"timestamp":0,"input_length":' + "[" * 100_000, "line 1: not JSON (maximum recursion depth"),
        (f"{HEADER}0,5,5\n" + "0" * (1 << 21), "line 3: longer than 1,048,576 characters"),
        ("\0\0\0\0", "line 1: the header has to name"),
        ("", "the header has to name"),
    ],
    ids=lambda value: str(value)[-30:],
)
@pytest.mark.parametrize("command", ["simulate", "tune"])
def test_absurd_traces(
    content: str, message: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    trace.write_text(content)
    target = ["--tpot-target-ms", "100"] if command == "tune" else []
    text = refusal(monkeypatch, "--trace", str(trace), *target, command=command)
    assert text.startswith(f"trace {trace}")
    assert message in text


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ('{"prompt":100000000000000,"output":5}', "groups[0]: prompt must be at most 10,000,000 tokens"),
        ('{"prompt":5,"output":5,"system":20000000}', "groups[0]: system must be at most 10,000,000 tokens"),
        ('{"prompt":5,"output":5,"requests":2000000}', "at most 1,000,000 requests, not 2000000"),
        (
            '{"prompt":5,"output":5,"requests":900000},{"prompt":5,"output":5,"requests":900000}',
            "at most 1,000,000 requests, not 1800000",
        ),
        ('{"prompt":5,"output":5,"priority":1' + "0" * 400 + "}", "groups[0]: priority must be within 1e+15"),
        ('{"prompt":5,"output":5,"spread":NaN}', "groups[0]: spread must be at least 0, not nan"),
        ('{"prompt":5,"output":5,"rate":1e-300,"requests":3}', "at most 1e+12 are simulated"),
        ("[" * 100_000, "not JSON (maximum recursion depth"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_absurd_scenarios(groups: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = tmp_path / "s.json"
    scenario.write_text('{"groups":[' + groups + "]}")
    assert message in refusal(monkeypatch, "--scenario", str(scenario))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--prompt", "1000000000000", "--output", "5"], "prompt must be at most 10,000,000"),
        (["--rate", "1", "--prompt", "5", "--output", "1" + "0" * 30], "output must be at most 10,000,000"),
        (["--rate", "0", "--prompt", "5", "--output", "5"], "rate must be above 0"),
        (["--rate", "1e308", "--prompt", "5", "--output", "5"], "rate must be at most 1e+09 or inf"),
        (["--rate", "1e-320", "--prompt", "5", "--output", "5"], "at most 1e+12 are simulated"),
        (
            ["--rate", "inf", "--prompt", "5", "--output", "5", "--duration", "5"],
            "at most 1,000,000 requests",
        ),
        ([*RATE, "--duration", "inf"], "at most 1,000,000 requests, not inf"),
        ([*RATE, "--limit", "1000000000000"], "at most 1,000,000 requests"),
        ([*RATE, "--start", "inf"], "no request is left"),
        ([*RATE, "--length-scale", "inf"], "a prompt or reply has inf tokens"),
        ([*RATE, "--length-scale", "1e300"], "tokens, at most 10,000,000 are simulated"),
        ([*RATE, "--time-scale", "inf"], "at most 1e+12 are simulated (times are scaled by inf)"),
        ([*RATE, "--time-scale", "1e308"], "at most 1e+12 are simulated"),
        ([*RATE, "--num-blocks", "100000000000"], "a simulated KV cache has at most 10,000,000 blocks"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_absurd_numbers(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert message in refusal(monkeypatch, *arguments)


@pytest.mark.parametrize(
    "arguments", [[], ["--scenario", "chat", "--time-scale", "0"]], ids=["plain", "at once"]
)
def test_too_few_steps_to_tune_with(arguments: list[str]) -> None:
    """How many are needed shows only in the search, so this one begins."""
    few = ["tune", "--tpot-target-ms", "100", "--cost", "gemma3-270m", "--max-steps", "1000", *arguments]
    with pytest.raises(
        ConfigError, match=r"^max_steps is 1000: they were used up after \d+ trials, before any"
    ):
        CliRunner().invoke(app, few, catch_exceptions=False)


@pytest.mark.parametrize("flag", ["--scenario", "--cost", "--config"])
def test_files_without_end_are_not_read_whole(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--cost /dev/zero` would: it took all memory."""
    file = tmp_path / "endless.json"
    file.touch()
    os.truncate(file, 1 << 40)
    workload = [] if flag == "--scenario" else RATE
    text = refusal(monkeypatch, *workload, flag, str(file))
    assert text.endswith(f"{file}: cannot be read (more than 16,777,216 bytes)")
