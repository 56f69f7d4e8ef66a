"""The commands as processes: what they print, and that every failure is one line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from legato.config import fields

COMMAND = [sys.executable, "-c", "from legato.cli.main import run; run()"]


def legato(
    *arguments: str, cwd: Path, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "COLUMNS": "200", **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_names_every_command_and_every_setting(tmp_path: Path) -> None:
    out = legato("--help", cwd=tmp_path)
    assert out.returncode == 0
    for command in ("serve", "generate", "chat", "doctor", "config"):
        assert command in out.stdout
    flags = legato("serve", "--help", cwd=tmp_path, COLUMNS="300").stdout
    for _, name, _ in fields():
        assert name == "model" or f"--{name.replace('_', '-')}" in flags
        assert f"LEGATO_{name.upper()}" in flags


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "runtime.toml").write_text(
        "[engine]\nmax_batch_tokens = 100\nmax_running = 3\nblock_size = 8\n"
    )
    out = legato(
        "config",
        "--max-num-batched-tokens",
        "300",
        cwd=tmp_path,
        LEGATO_MAX_BATCH_TOKENS="200",
        LEGATO_BLOCK_SIZE="4",
    )
    engine = json.loads(out.stdout)["engine"]
    assert (engine["max_batch_tokens"], engine["max_running"], engine["block_size"]) == (300, 3, 4)


def test_vllm_names_are_the_same_settings(tmp_path: Path) -> None:
    out = legato("config", "--max-num-seqs", "7", "--max-num-batched-tokens", "9", cwd=tmp_path)
    engine = json.loads(out.stdout)["engine"]
    assert (engine["max_running"], engine["max_batch_tokens"]) == (7, 9)


def test_the_schema_is_printed(tmp_path: Path) -> None:
    schema = json.loads(legato("config", "--schema", cwd=tmp_path).stdout)
    assert "prefill_chunk" in schema["$defs"]["EngineSettings"]["properties"]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["serve", "no/such/model.gguf"], {}, "no/such/model.gguf"),
        (["serve", "nonsense"], {}, "gemma3-270m"),
        (["serve", "--device", "tpu"], {}, " (--device)"),
        (["serve"], {"LEGATO_MAX_MODEL_LEN": "99999"}, "at most 32768 tokens (LEGATO_MAX_MODEL_LEN)"),
        (["serve", "gemma3-270m", "--dtype", "float16"], {}, "float16 does not work for Gemma 3"),
        (["serve", "--max-running", "0"], {}, "error: --max-running: "),
        (["serve", "--max-num-seqs", "9"], {"LEGATO_MAX_RUNNING": "0", "LEGATO_PORT": "-1"}, "LEGATO_PORT: "),
        (
            ["serve", "--max-running", "9"],
            {"LEGATO_MAX_BATCH_TOKENS": "8"},
            "error: LEGATO_MAX_BATCH_TOKENS, --max-running: max_running (9) is above max_batch_tokens (8)",
        ),
        (["serve", "--kv-memory", "lots"], {}, "error: --kv-memory: not a size"),
        (["serve", "--kv-memory", "9999GiB"], {}, "GiB available"),
        (["serve", "--num-blocks", "99999999"], {}, "GiB available"),
        (["serve", "--config", "none.toml"], {}, "none.toml"),
        (["serve", "--host", "256.1.1.1"], {}, "256.1.1.1"),
        (["serve", "--journal", "no/such/folder/j"], {}, "no/such/folder/j"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    out = legato(*arguments, cwd=tmp_path, HF_HUB_OFFLINE="1", **environment)
    assert out.returncode == 1, out
    lines = out.stderr.strip().splitlines()
    assert lines[-1].startswith("legato: error: ")
    assert message in lines[-1]
    assert "Traceback" not in out.stderr
    assert out.stdout == ""


def test_an_unknown_variable_is_told_and_stops_nothing(tmp_path: Path) -> None:
    """Kubernetes names variables after services, and a service may be called legato."""
    out = legato("config", cwd=tmp_path, LEGATO_MAX_BATCHES="1", LEGATO_SERVICE_HOST="10.0.0.1")
    assert out.returncode == 0
    assert json.loads(out.stdout)
    assert out.stderr.splitlines() == [
        "legato: warning: LEGATO_MAX_BATCHES: no such setting; did you mean LEGATO_MAX_BATCH_TOKENS?",
        "legato: warning: LEGATO_SERVICE_HOST: no such setting",
    ]


def test_a_small_budget_needs_no_second_flag(tmp_path: Path) -> None:
    out = legato("config", "--max-batch-tokens", "16", cwd=tmp_path)
    assert out.returncode == 0
    assert json.loads(out.stdout)["engine"]["max_batch_tokens"] == 16


def test_a_flag_of_the_wrong_type_names_flag_and_variable(tmp_path: Path) -> None:
    out = legato("serve", cwd=tmp_path, LEGATO_PORT="http")
    assert out.returncode == 2
    assert "LEGATO_PORT" in out.stderr


def test_doctor_passes_on_the_demo_model(tmp_path: Path, gemma_path: Path) -> None:
    settings = ["--num-blocks", "64", "--threads", "1"]
    out = legato("doctor", "gemma3-270m", "--json", *settings, cwd=tmp_path, **cache(gemma_path))
    report = json.loads(out.stdout)
    assert out.returncode == 0
    assert report["passed"]
    assert report["self-test"] == {
        "known answer": "passed",
        "same answer in a crowd": "passed (8 tokens compared)",
    }
    assert report["model"]["family"] == "gemma3"
    assert "64 blocks" in report["choices"]["kv cache"]
    assert ", 1 of " in report["choices"]["device"]


def test_generate_prints_the_reply_and_nothing_else(tmp_path: Path, gemma_path: Path) -> None:
    settings = ["--model", str(gemma_path), "--num-blocks", "64", "--max-tokens", "5"]
    out = legato("generate", "The capital of France is", *settings, cwd=tmp_path)
    assert out.stdout == " the capital of the country\n"
    piped = legato("generate", "-", *settings, cwd=tmp_path, stdin="The capital of France is")
    assert piped.stdout == out.stdout


def test_chat_with_a_base_model_says_why_not_before_it_loads_weights(
    tmp_path: Path, gemma_path: Path
) -> None:
    out = legato("chat", str(gemma_path), "--num-blocks", "64", cwd=tmp_path)
    assert out.returncode == 1
    assert "base model without a chat template" in out.stderr
    assert "loading" not in out.stderr


def test_chat_answers_with_a_template_that_is_given(tmp_path: Path, gemma_path: Path) -> None:
    settings = ["--chat-template", "gemma", "--num-blocks", "64", "--max-tokens", "4", "--temperature", "0"]
    out = legato("chat", str(gemma_path), *settings, cwd=tmp_path, stdin="Hi\n/new\nHi\n")
    assert out.returncode == 0
    answers = [line.lstrip("> ") for line in out.stdout.splitlines() if line.startswith("> ")]
    assert answers[0] == answers[1] != "", out.stdout


def cache(gemma_path: Path) -> dict[str, str]:
    """The folder in which the test session has put the demo model together."""
    return {"LEGATO_CACHE_DIR": str(gemma_path.parents[2])}


INTERRUPTED = """
import os, signal, sys

library = sys.argv.pop(1)

class Importer:
    def find_spec(self, name, path=None, target=None):
        if name == library:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:  # as torch's C code does
                sys.exit("swallowed")

sys.meta_path.insert(0, Importer())
from legato.cli.main import run
run()
"""


@pytest.mark.parametrize(
    ("library", "command"),
    [
        *(("torch", command) for command in ("generate hi", "chat", "doctor", "serve --port 0", "tune")),
        *((library, "serve --port 0") for library in ("typer", "pydantic", "fastapi", "uvicorn")),
        ("pydantic", "simulate --scenario chat"),
        ("pydantic", "config"),
    ],
)
def test_ctrl_c_ends_the_process_whatever_a_library_makes_of_it_while_it_is_imported(
    library: str, command: str, tmp_path: Path, gemma_path: Path
) -> None:
    """`library` is what swallows the interrupt."""
    command += " --tpot-target-ms 100" if command == "tune" else ""
    out = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, library, *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **cache(gemma_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (out.returncode, out.stderr.removeprefix("finding gemma3-270m\n")) == (-signal.SIGINT, "")


def test_problems_of_settings_are_told_in_our_words(tmp_path: Path) -> None:
    for arguments, told in (
        (("--port", "99999"), "--port: must be less than or equal to 65535 (not 99999)"),
        (("--policy", "x"), "--policy: must be 'fair', 'fcfs', 'shortest' or 'priority' (not 'x')"),
        (
            ("--policy", "fcsf"),
            "--policy: must be 'fair', 'fcfs', 'shortest' or 'priority' (not 'fcsf'); did you mean fcfs?",
        ),
    ):
        assert legato("serve", *arguments, cwd=tmp_path).stderr == f"legato: error: {told}\n"
