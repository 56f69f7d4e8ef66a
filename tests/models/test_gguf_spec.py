"""From GGUF metadata to a `ModelSpec`: what keys mean, what their absence means, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import SIZES, Contents, convert, opened
from transformers import PreTrainedModel

from legato.errors import ModelError
from legato.models.gguf_file import GgufFile
from legato.models.gguf_spec import spec_from_gguf
from legato.models.spec import LinearScaling, ModelSpec, YarnScaling


@pytest.fixture(scope="module")
def llama(published_model: Callable[[str, dict[str, object]], PreTrainedModel]) -> Contents:
    return convert(published_model("LlamaConfig", SIZES))


def refusal(folder: Path, contents: Contents) -> str:
    """Why a file with these contents is not loaded: one line with its path."""
    file = opened(folder, contents)
    with pytest.raises(ModelError) as caught:
        spec_from_gguf(file)
    assert caught.value.message.startswith(f"{file.path}: ")
    assert "\n" not in caught.value.message
    return caught.value.message


# What cannot be served


def test_an_unknown_architecture_is_named_with_the_supported_ones(llama: Contents, tmp_path: Path) -> None:
    message = refusal(tmp_path, replace(llama, architecture="mamba"))
    assert "architecture 'mamba' is not supported (supported: llama, qwen2, qwen3, gemma3)" in message


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key_is_named(key: str, llama: Contents, tmp_path: Path) -> None:
    message = refusal(tmp_path, llama.but(metadata={f"llama.{key}": None}))
    assert f"metadata key llama.{key} is missing" in message


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("block_count", 0, "llama.block_count is 0, not within 1 .. 2147483647"),
        ("block_count", 2_000_000_000, "claims 2000000000 layers, but has 21 tensors in all"),
        ("block_count", "two", "is a str, not a int"),
        ("attention.head_count", [4, 4], "is a list, not a int"),
        ("attention.head_count", 4_000_000_000, "not within"),
        ("attention.head_count", 3, "heads must be a multiple of kv heads"),
        ("attention.key_length", 15, "llama.attention.value_length is 16; only 15 is supported"),
        ("attention.layer_norm_rms_epsilon", -1.0, "not a positive number"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "not a positive number"),
        ("rope.freq_base", float("inf"), "not a positive number"),
        ("rope.dimension_count", 8, "llama.rope.dimension_count is 8; only 16 is supported"),
        ("expert_count", 8, "llama.expert_count is 8; only 0 is supported"),
        ("rope.scaling.type", "longrope", "rope scaling 'longrope' is not supported"),
        ("rope.scaling.factor", -2.0, "not a positive number"),
    ],
)
def test_an_absurd_or_unsupported_value_is_named(
    key: str, value: object, problem: str, llama: Contents, tmp_path: Path
) -> None:
    changes: dict[str, object] = {f"llama.{key}": value}
    if key == "rope.scaling.type":
        changes["llama.rope.scaling.factor"] = 4.0
    assert problem in refusal(tmp_path, llama.but(metadata=changes))


def test_more_tokens_than_rows_are_refused(llama: Contents, tmp_path: Path) -> None:
    more = [f"token {i}" for i in range(102)]
    message = refusal(tmp_path, llama.but(metadata={"tokenizer.ggml.tokens": more}))
    assert "the tokenizer has 102 tokens, the embedding only 101 rows" in message


# What files leave out, and what Gemma fixes


def test_absent_sizes_have_llama_cpps_defaults(llama: Contents, tmp_path: Path) -> None:
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    spec = spec_from_gguf(opened(tmp_path, llama.but(metadata={f"llama.{key}": None for key in absent})))
    assert (spec.num_kv_heads, spec.head_dim) == (4, 12)
    assert spec.layers[0].rope.base == 10_000.0


def test_a_head_count_per_layer_is_refused_even_if_all_are_equal(llama: Contents, tmp_path: Path) -> None:
    message = refusal(tmp_path, llama.but(metadata={"llama.attention.head_count_kv": [2, 2]}))
    assert "is a list, not a int" in message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear", "factor": 1.0}, None),
        ({"type": "linear", "factor": 0.0}, None),
        ({"factor": 4.0}, LinearScaling(factor=4.0)),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "attn_factor": 0.5,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
            },
            YarnScaling(
                factor=4.0,
                original_max_position=4096,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=0.5 * 1.1386294361119891,
            ),
        ),
    ],
)
def test_rope_scaling_is_read_as_llama_cpp_reads_it(
    given: dict[str, object], expected: object, llama: Contents, tmp_path: Path
) -> None:
    changes = {f"llama.rope.scaling.{key}": value for key, value in given.items()}
    spec = spec_from_gguf(opened(tmp_path, llama.but(metadata=changes)))
    assert spec.layers[0].rope.scaling == expected


def gemma_spec(folder: Path, num_layers: int, **changes: object) -> ModelSpec:
    """The spec of a Gemma 3 of that many layers, without its weights."""
    keys: dict[str, object] = {
        "block_count": num_layers,
        "context_length": 131072,
        "embedding_length": 5376,
        "feed_forward_length": 21504,
        "attention.head_count": 32,
        "attention.head_count_kv": 16,
        "attention.key_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 1024,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        **changes,
    }
    names = ["token_embd.weight", *(f"blk.{i}.attn_norm.weight" for i in range(num_layers))]
    contents = Contents(
        architecture="gemma3",
        metadata={f"gemma3.{key}": value for key, value in keys.items()},
        tensors={name: np.zeros((2, 2), np.float32) for name in names},
    )
    return spec_from_gguf(opened(folder, contents))


def test_gemma_scales_global_layers_only(tmp_path: Path) -> None:
    """F-12, F-13: every sixth layer is global, with the file's base and scaling; the others are local."""
    layers = gemma_spec(tmp_path, 34).layers
    assert [i for i, layer in enumerate(layers) if layer.window is None] == [5, 11, 17, 23, 29]
    for layer in layers:
        if layer.window is None:
            assert (layer.rope.base, layer.rope.scaling) == (1e6, LinearScaling(factor=8.0))
        else:
            assert (layer.window, layer.rope.base, layer.rope.scaling) == (1024, 10_000.0, None)


def test_gemma_keys_for_the_local_base_and_the_period_are_obeyed(tmp_path: Path) -> None:
    changes = {"rope.freq_base_swa": 20_000.0, "attention.sliding_window_pattern": 2}
    layers = gemma_spec(tmp_path, 4, **changes).layers
    assert [layer.window for layer in layers] == [1024, None, 1024, None]
    assert layers[0].rope.base == 20_000.0


def test_gemma_27b_scales_attention_by_its_width(tmp_path: Path) -> None:
    assert gemma_spec(tmp_path, 62).attention_scale == pytest.approx(168**-0.5)
    assert gemma_spec(tmp_path, 48).attention_scale == pytest.approx(128**-0.5)


def test_the_demo_model_is_gemma_3_270m(gemma_path: Path) -> None:
    spec = spec_from_gguf(GgufFile(gemma_path))
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (
        "gemma3",
        262144,
        640,
        2048,
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.num_layers) == (4, 1, 256, 18)
    assert [i for i, layer in enumerate(spec.layers) if layer.window is None] == [5, 11, 17]
    assert {(layer.window, layer.rope.base) for layer in spec.layers} == {
        (512, 10_000.0),
        (None, 1_000_000.0),
    }
    assert (spec.max_position, spec.norm_eps, spec.activation) == (32768, 1e-6, "gelu_tanh")
    assert (spec.tie_embeddings, spec.qk_norm, spec.post_norms, spec.qkv_bias) == (True, True, True, False)
    assert (spec.embedding_scale, spec.attention_scale) == (pytest.approx(640**0.5), 1 / 16)
