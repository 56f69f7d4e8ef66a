"""A start whose caches are all damaged says so in warnings and gives the same reply as before."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import httpx
import pytest
import torch
from tiny_gguf import SIZES, convert, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

import legato.kernels
from legato.text.vocabulary import byte_alphabet

NAME, FILE, PARTS = "tiny", "tiny.gguf", ("tiny_model_part1", "tiny_model_part2")
TOKENIZER: dict[str, object] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*byte_alphabet(), "<bos>", "<eos>", "ab"],
    "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 256,
    "tokenizer.ggml.eos_token_id": 257,
}
SERVE = """
import json, sys
from legato.models import packaged
told = json.loads(sys.argv.pop(1))
told["parts"] = tuple(tuple(part) for part in told["parts"])
packaged.PACKAGED_MODELS = (packaged.PackagedModel(**told),)
from legato.cost.step_cost import StepShape
from legato.engine import step_costs
measured = ((StepShape(1, 0, 100, 0, True), 0.02), (StepShape(0, 64, 0, 4096, False), 0.05))
step_costs.calibrate = lambda *_, **__: measured  # takes no time, and no other program disturbs it
from legato.cli.main import run
run()
"""
"""`legato serve` where one small packaged model is installed."""


@pytest.fixture
def model(tmp_path: Path) -> dict[str, object]:
    """What is to be told of the packaged model, whose parts lie below tmp_path / "packages"."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    contents = convert(LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)))
    file = tmp_path / "whole.gguf"
    write_gguf(file, contents.but(metadata=TOKENIZER), kind=gguf.GGMLQuantizationType.Q8_0)
    whole = file.read_bytes()
    for name, content in zip(PARTS, (whole[:50_000], whole[50_000:]), strict=True):
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "part.bin").write_bytes(content)
    return {
        "name": NAME,
        "extra": NAME,
        "filename": FILE,
        "parts": [(name, "part.bin") for name in PARTS],
        "num_bytes": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
    }


def reply(model: dict[str, object], folder: Path) -> tuple[list[int], str]:
    """Start a server, ask it once, end it: (the tokens of its reply, what it wrote to stderr)."""
    environment = {
        "PYTHONPATH": os.pathsep.join([os.getcwd(), str(folder / "packages")]),
        "LEGATO_CACHE_DIR": str(folder / "cache"),
    }
    with (folder / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, json.dumps(model), "serve", NAME, "--port", "0"],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        with process:
            assert process.stdout is not None
            line = process.stdout.readline()
            try:
                assert line.startswith("Legato is ready on "), (folder / "stderr").read_text()
                body = {"prompt": "ab", "max_tokens": 24, "temperature": 0, "return_token_ids": True}
                answer = httpx.post(f"{line.split()[-1]}/v1/completions", json=body, timeout=60).json()
            finally:
                process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=40) == 0
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids, (folder / "stderr").read_text()


def keep_kernels(cache: Path) -> list[Path]:
    """The kernels of this cache, with copies of those that an earlier run kept beside the source."""
    source = Path(legato.kernels.__file__).parent
    own = f"{source.name}_{hashlib.sha256(str(source).encode()).hexdigest()[:16]}"
    folder = cache / "kernels" / own
    folder.mkdir(parents=True, exist_ok=True)
    for file in (source / "__pycache__").glob("*.kernel"):
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return sorted(folder.glob("*.kernel"))


def damage(file: Path, draw: random.Random) -> None:
    """Cut at random, zeroed or inverted from somewhere on, or replaced by a folder."""
    content = file.read_bytes()
    at = draw.randrange(len(content))
    changes: list[Callable[[], object]] = [
        lambda: file.write_bytes(content[:at]),
        lambda: file.write_bytes(content[:at] + bytes(byte ^ 255 for byte in content[at:])),
        lambda: file.write_bytes(bytes(len(content))),
        lambda: (file.unlink(), file.mkdir()),
    ]
    draw.choice(changes)()


def test_a_start_with_every_cache_damaged_gives_the_same_reply(
    model: dict[str, object], tmp_path: Path
) -> None:
    cache, draw = tmp_path / "cache", random.Random(0)
    whole, errors = reply(model, tmp_path)
    assert len(whole) == 24
    assert "WARNING" not in errors
    kernels = keep_kernels(cache)
    (costs,) = (cache / "costs").iterdir()
    (receipt,) = (cache / "checked").iterdir()
    (joined,) = (cache / "models").rglob(FILE)
    for file in (*kernels, costs, receipt, joined):
        damage(file, draw)

    again, errors = reply(model, tmp_path)
    assert again == whole
    assert "Traceback" not in errors
    assert f"{joined}: not the model that it should be" in errors or f"{joined}: a folder" in errors
    assert sum(f"compiled kernel {kernel}: " in errors for kernel in kernels) > 3
    assert hashlib.sha256(joined.read_bytes()).hexdigest() == model["sha256"]

    (anew,) = set((cache / "costs").iterdir()) - {costs}  # the costs belong to the file that was joined anew
    damage(anew, draw)
    again, errors = reply(model, tmp_path)
    assert again == whole
    assert "Traceback" not in errors
    assert f"cost file {anew}: " in errors
    assert "measuring anew" in errors
