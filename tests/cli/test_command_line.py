"""The command line itself: help, version, completion, what is imported, misspelled words, vLLM's flags."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from legato import __version__
from legato.cli.flags import UsageFault, read_flags
from legato.config import fields, load_settings
from legato.config.vllm import RENAMED, find_other, translate
from legato.errors import ConfigError

COMMANDS = ("serve", "generate", "chat", "doctor", "simulate", "tune", "config", "version")

RUN = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name in {forbidden!r}:
            sys.exit(name + " was imported")

sys.meta_path.insert(0, Forbidden())
from legato.cli.main import run
run()
"""


def legato(
    *words: str, cwd: Path, forbidden: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN.format(forbidden=forbidden), *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("flag", ["--version", "-V", "version"])
def test_the_version_is_told_without_any_library(flag: str, tmp_path: Path) -> None:
    libraries = ("pydantic", "typer", "rich", "torch", "numpy", "numba", "fastapi")
    out = legato(flag, cwd=tmp_path, forbidden=libraries)
    assert (out.returncode, out.stdout, out.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "nonsense"),
        ("serve", "no/such/model.gguf"),
        ("chat", "nonsense"),
        ("doctor", "nonsense"),
        ("tune", "nonsense", "--tpot-target-ms", "100"),
        ("generate", "hello", "--model", "nonsense"),
    ],
)
def test_a_wrong_model_is_refused_before_libraries_are_loaded_that_take_seconds(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    heavy = ("torch", "numpy", "numba", "fastapi", "uvicorn", "tokenizers", "huggingface_hub", "llguidance")
    out = legato(*words, cwd=tmp_path, forbidden=heavy)
    assert out.returncode == 1
    assert out.stderr.startswith(
        f"legato: error: model '{words[1] if words[0] != 'generate' else words[3]}': no"
    )


def test_a_folder_without_a_model_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    out = legato("generate", "hello", "--model", ".", cwd=tmp_path, forbidden=("torch", "numba"))
    assert (out.returncode, "has no config.json" in out.stderr) == (1, True)


@pytest.mark.parametrize("command", [(), *((command,) for command in COMMANDS)])
def test_h_is_help(command: tuple[str, ...], tmp_path: Path) -> None:
    short, long = (legato(*command, flag, cwd=tmp_path) for flag in ("-h", "--help"))
    assert (short.returncode, short.stdout) == (0, long.stdout)
    assert "Usage: legato" in short.stdout


def test_no_words_at_all_show_the_help(tmp_path: Path) -> None:
    out = legato(cwd=tmp_path)
    assert (out.returncode, out.stdout) == (0, legato("--help", cwd=tmp_path).stdout)
    assert "--install-completion" in out.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("legato ser", ["serve"]),
        ("legato serve --max-run", ["--max-running"]),
        ("legato serve --policy f", ["fair", "fcfs"]),
        ("legato serve ge", ["gemma3-270m"]),
        ("legato simulate --scenario st", ["stall"]),
    ],
)
def test_a_shell_completes_commands_flags_choices_and_names(
    typed: str, offered: list[str], tmp_path: Path
) -> None:
    out = legato(
        cwd=tmp_path,
        _LEGATO_COMPLETE="complete_bash",
        COMP_WORDS=typed,
        COMP_CWORD=str(len(typed.split()) - 1),
    )
    assert (out.returncode, out.stdout.split()) == (0, offered), out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "--max-runing", "3"), "--max-runing: no such flag; did you mean --max-running?"),
        (("serve", "--Port", "3"), "--Port: no such flag; did you mean --port?"),
        (("serve", "--prefix-cash"), "--prefix-cash: no such flag; did you mean --prefix-cache?"),
        (("simulate", "--scenaro", "chat"), "--scenaro: no such flag; did you mean --scenario?"),
        (("serve", "--qwertz"), "--qwertz: no such flag"),
        (("generate", "hi", "--port", "3"), "--port: this command has no use for it"),
        (
            ("generate", "hi", "--enable-log-requests"),
            "--enable-log-requests: this command has no use for it",
        ),
        (("serv",), "No such command 'serv'. Did you mean 'serve'?"),
        (("serve", "--gpu-memory-utilization", "0.9"), "--gpu-memory-utilization: not a setting of Legato: "),
    ],
)
def test_a_misspelled_word_is_one_line_that_says_what_was_meant(
    words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    out = legato(*words, cwd=tmp_path)
    assert (out.returncode, out.stdout) == (2, "")
    assert out.stderr.startswith(f"legato: error: {message}")
    assert out.stderr.count("\n") == 1


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    code = (
        "import os, signal\n"
        "from legato.cli.interrupts import importing\n"
        "with importing():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert out.stdout == "True\n"


FLAGS = {
    "--max-running": True,
    "--prefix-cache": False,
    "--no-prefix-cache": False,
    "--prefill-chunk": True,
} | {
    "--stop": True,
    "--log-prompts": False,
    "--no-log-prompts": False,
}


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("--max_running 3", "--max-running 3"),
        ("--max-running=3 x", "--max-running=3 x"),
        ("--enable-chunked-prefill x", "x"),
        ("--no-enable-chunked-prefill x", "--prefill-chunk 0 x"),
        ("--enable-chunked-prefill=False", "--prefill-chunk 0"),
        ("--long-prefill-token-threshold 512 x", "--prefill-chunk 512 x"),
        ("--long_prefill_token_threshold=512", "--prefill-chunk 512"),
        ("--long-prefill-token-threshold 0", ""),
        ("--tensor-parallel-size 1 -pp 1 -tp=1 x", "x"),
        ("--disable-log-requests", "--no-log-prompts"),
        ("--no-disable-log-requests", "--log-prompts"),
        ("--stop --tensor-parallel-size 1", "--stop --tensor-parallel-size 1"),
        ("-- --tensor-parallel-size 2", "-- --tensor-parallel-size 2"),
    ],
)
def test_flags_of_vllm_become_ours(words: str, read: str) -> None:
    assert list(read_flags(words.split(), FLAGS)) == read.split()


@pytest.mark.parametrize("words", ["--tensor-parallel-size 2", "-tp 2", "--tensor-parallel-size", "--seed 3"])
def test_flags_of_vllm_that_cannot_be_followed_are_refused(words: str) -> None:
    with pytest.raises(UsageFault):
        list(read_flags(words.split(), FLAGS))


VLLM_FLAGS = """
allow-credentials allowed-headers allowed-local-media-path allowed-methods allowed-origins api-key
api-server-count async-scheduling attention-backend block-size calculate-kv-scales chat-template
chat-template-content-format code-revision collect-detailed-traces compilation-config config-format
convert cpu-offload-gb cuda-graph-sizes data-parallel-address data-parallel-backend data-parallel-size
disable-custom-all-reduce disable-fastapi-docs disable-hybrid-kv-cache-manager disable-log-requests
disable-log-stats disable-sliding-window disable-uvicorn-access-log distributed-executor-backend
download-dir dtype enable-auto-tool-choice enable-chunked-prefill enable-expert-parallel
enable-force-include-usage enable-log-outputs enable-log-requests enable-lora enable-prefix-caching
enable-prompt-embeds enable-prompt-tokens-details enable-request-id-headers enable-sleep-mode
enable-ssl-refresh enforce-eager fully-sharded-loras generation-config gpu-memory-utilization
guided-decoding-backend guided-decoding-disable-fallback h11-max-header-count headless hf-config-path
hf-overrides hf-token host kv-cache-dtype kv-cache-memory-bytes kv-events-config kv-transfer-config
limit-mm-per-prompt load-format log-config-file logits-processor-pattern logits-processors logprobs-mode
long-prefill-token-threshold lora-dtype lora-extra-vocab-size lora-modules mamba-cache-dtype
max-cpu-loras max-log-len max-logprobs max-long-partial-prefills max-lora-rank max-loras max-model-len
max-num-batched-tokens max-num-partial-prefills max-num-seqs max-seq-len-to-capture middleware
mm-processor-kwargs model model-impl num-gpu-blocks-override num-lookahead-slots num-scheduler-steps
num-speculative-tokens otlp-traces-endpoint override-generation-config pipeline-parallel-size port
preemption-mode prefix-caching-hash-algo quantization ray-workers-use-nsight reasoning-parser
response-role return-tokens-as-token-ids revision rope-scaling rope-theta root-path runner scheduler-cls
scheduler-delay-factor scheduling-policy seed served-model-name show-hidden-metrics-for-version
skip-tokenizer-init speculative-config speculative-model ssl-ca-certs ssl-cert-reqs ssl-certfile
ssl-keyfile stream-interval structured-outputs-config swap-space task tensor-parallel-size tokenizer
tokenizer-mode tokenizer-revision tool-call-parser tool-parser-plugin tool-server trust-remote-code
uvicorn-log-level worker-cls
""".split()  # noqa: SIM905
"""Flags of `vllm serve`, of several versions."""


@pytest.mark.parametrize("flag", VLLM_FLAGS)
def test_every_flag_of_vllm_is_a_setting_or_is_refused_with_a_reason(flag: str) -> None:
    name = flag.replace("-", "_")
    ours = {known for _, known, _ in fields()}
    if RENAMED.get(name, name) in ours:
        return
    other = find_other(name)
    assert other is not None
    if other.setting is not None:
        assert translate(name, "7") == (other.setting, "7")
        return
    with pytest.raises(ConfigError, match=f"^{name}: not a setting of Legato: ."):
        translate(name, "a value of nobody's")


def test_renamed_and_translated_settings_are_settings() -> None:
    ours = {known for _, known, _ in fields()}
    assert set(RENAMED.values()) <= ours
    assert not set(RENAMED) & ours
    for name in (flag.replace("-", "_") for flag in VLLM_FLAGS):
        other = find_other(name)
        if other is not None and name not in RENAMED:
            assert {*(setting for _, setting, _ in other.becomes), other.setting} <= {*ours, None}
            assert name not in ours


def test_vllms_words_for_values_are_ours(tmp_path: Path) -> None:
    """In the file as on the command line."""
    file = tmp_path / "runtime.toml"
    file.write_text('[model]\ndtype = "half"\ngeneration_config = "vllm"\n')
    settings = load_settings(file, {})
    assert (settings.model.dtype, settings.model.generation_config) == ("float16", "none")


def test_a_command_line_of_vllm_works(tmp_path: Path) -> None:
    words = (
        "config --model m --max-num-seqs 8 --max_num_batched_tokens 512 --max-model-len 4096 -tp 1 "
        "--dtype float --enable-chunked-prefill --no-enable-prefix-caching "
        "--scheduling-policy fcfs --block-size 16 "
        "--num-gpu-blocks-override 99 --kv-cache-dtype float16 --disable-log-requests --enforce-eager "
        "--uvicorn-log-level warning --enable-auto-tool-choice --tool-call-parser hermes "
        "--generation-config vllm"
    )
    settings = json.loads(legato(*words.split(), cwd=tmp_path).stdout)
    model, engine, server = (settings[name] for name in ("model", "engine", "server"))
    assert (model["max_model_len"], model["dtype"], model["generation_config"]) == (4096, "float32", "none")
    assert (engine["max_running"], engine["max_batch_tokens"], engine["prefix_cache"]) == (8, 512, False)
    assert (engine["policy"], engine["block_size"], engine["num_blocks"]) == ("fcfs", 16, 99)
    assert (engine["kv_dtype"], engine["prefill_chunk"]) == ("float16", None)
    assert (server["log_level"], server["log_prompts"], server["tool_call_parser"]) == (
        "warning",
        False,
        "hermes",
    )
