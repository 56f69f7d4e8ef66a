"""Every damaged model ends the start with one line that says which file and what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_commands import legato
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def folder_with(folder: Path, **config: object) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    tokenizer = Tokenizer(BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def llama_tensors() -> dict[str, torch.Tensor]:
    """Every tensor that a model of the configuration above has."""
    shapes = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 16)}
    tensors = {f"self_attn.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    tensors |= {f"mlp.{name}_proj": torch.zeros(16, 16) for name in ("gate", "up", "down")}
    tensors |= {name: torch.zeros(16) for name in ("input_layernorm", "post_attention_layernorm")}
    named = {f"model.layers.0.{name}.weight": tensor for name, tensor in tensors.items()}
    return named | {"model.embed_tokens.weight": torch.zeros(32, 16), "model.norm.weight": torch.zeros(16)}


def truncated_gguf(folder: Path, gemma: Path) -> Path:
    file = folder / "cut.gguf"
    with gemma.open("rb") as whole:
        file.write_bytes(whole.read(20_000_000))
    return file


def missing_shard(folder: Path, gemma: Path) -> Path:  # noqa: ARG001
    folder_with(folder)
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    tensors = llama_tensors()
    weight_map = {name: shards[i % 2] for i, name in enumerate(tensors)}
    save_file({name: tensors[name] for name in tensors if weight_map[name] == shards[0]}, folder / shards[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def wrong_shape(folder: Path, gemma: Path) -> Path:  # noqa: ARG001
    folder_with(folder)
    wrong = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(16, 15)}
    save_file(llama_tensors() | wrong, folder / "model.safetensors")
    return folder


def unknown_architecture(folder: Path, gemma: Path) -> Path:  # noqa: ARG001
    folder_with(folder, model_type="perceptron", architectures=["PerceptronForCausalLM"])
    save_file({"model.embed_tokens.weight": torch.zeros(32, 16)}, folder / "model.safetensors")
    return folder


def nothing(folder: Path, gemma: Path) -> Path:  # noqa: ARG001
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            truncated_gguf,
            ["cut.gguf", "truncated: tensor 'token_embd.weight'", "the file has 20000000 bytes"],
        ),
        (missing_shard, ["model-00002-of-00002.safetensors"]),
        (wrong_shape, ["model.safetensors", "model.layers.0.self_attn.q_proj.weight", "15"]),
        (unknown_architecture, ["config.json", "perceptron", "llama"]),
        (nothing, ["config.json"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_model_ends_the_start_with_one_line(
    tmp_path: Path, gemma_path: Path, make: Callable[[Path, Path], Path], words: list[str]
) -> None:
    """F-01, F-04: before the server listens, so it was never ready."""
    model = make(tmp_path, gemma_path)
    out = legato("serve", str(model), "--num-blocks", "4", cwd=tmp_path)
    assert out.returncode == 1, out
    assert out.stdout == ""
    line = out.stderr.strip().splitlines()[-1]
    assert line.startswith("legato: error: ")
    assert str(tmp_path) in line
    for word in words:
        assert word in line
    assert "Traceback" not in out.stderr
