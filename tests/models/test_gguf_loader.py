"""From GGUF to spec and weights: equal to what the safetensors of the same model give, in every family.

The files are made as llama.cpp's converter makes them (`tiny_gguf`), so a forgotten row order, a norm gain
with its 1 added twice or a wrong rotation shows as a difference (F-06, F-07, F-12, F-13, F-15, F-16, F-17).
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import SIZES, Contents, convert, opened, write_gguf
from transformers import PreTrainedModel

from legato.errors import ModelError
from legato.models.config_json import spec_from_folder
from legato.models.gguf_file import GgufFile
from legato.models.gguf_loader import PIECE_ELEMENTS, GgufWeights
from legato.models.gguf_spec import spec_from_gguf
from legato.models.load import open_model
from legato.models.rope import inverse_frequencies
from legato.models.safetensors_loader import SafetensorsWeights
from legato.models.source import ModelFiles
from legato.models.spec import FrequencyFactors, ModelSpec

CPU = torch.device("cpu")


def load_fp32(file: GgufFile, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Every tensor, read at once."""
    return dict(GgufWeights(file, spec, dtype=torch.float32, device=CPU))


GEMMA = {**SIZES, "num_hidden_layers": 7, "sliding_window": 6, "query_pre_attn_scalar": 16}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama_all_heads_alike": ("LlamaConfig", {**SIZES, "num_key_value_heads": 4}),
    "llama_biases_and_tied": (
        "LlamaConfig",
        {**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama_linear_rope": ("LlamaConfig", {**SIZES, "rope_parameters": LINEAR_ROPE}),
    "llama_yarn_rope": ("LlamaConfig", {**SIZES, "rope_parameters": YARN_ROPE}),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", {**SIZES, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "gemma3_scaled_rope_and_cap": (
        "Gemma3TextConfig",
        {**GEMMA, "rope_parameters": GEMMA_ROPE, "final_logit_softcapping": 30.0},
    ),
}

Build = Callable[[str, dict[str, object]], PreTrainedModel]


@pytest.fixture(scope="module")
def llama(published_model: Build) -> Contents:
    return convert(published_model(*MODELS["llama"]))


@pytest.fixture(scope="module")
def llama_file(llama: Contents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("llama") / "llama.gguf", llama)


def refusal(folder: Path, contents: Contents) -> str:
    """Why a file with these contents is not loaded: one line with its path."""
    file = opened(folder, contents)
    with pytest.raises(ModelError) as caught:
        load_fp32(file, spec_from_gguf(file))
    assert caught.value.message.startswith(f"{file.path}: ")
    assert "\n" not in caught.value.message
    return caught.value.message


# Against safetensors


@pytest.mark.parametrize("name", MODELS)
def test_spec_and_weights_equal_those_of_the_safetensors(
    name: str, published_model: Build, tmp_path: Path
) -> None:
    """F-15, and the others named above: Gemma's gains hold their 1 already, Llama's rows are reordered."""
    model = published_model(*MODELS[name])
    model.save_pretrained(tmp_path)
    file = opened(tmp_path, convert(model))
    expected = spec_from_folder(tmp_path)
    spec = spec_from_gguf(file)
    # GGUF has one architecture for both families.
    assert spec == replace(expected, family="llama" if expected.family == "mistral" else expected.family)
    weights = load_fp32(file, spec)
    published = SafetensorsWeights(tmp_path, expected, dtype=torch.float32, device=CPU)
    assert weights.keys() == published.keys() == spec.tensor_shapes().keys()
    for tensor, weight in weights.items():
        # Adding Gemma's 1 to a gain rounds once, here as there.
        assert torch.equal(weight, published[tensor]), tensor


def test_the_scaling_of_llama_3_comes_from_the_table_in_the_file(
    published_model: Build, tmp_path: Path
) -> None:
    """F-16: the same angles as from config.json, at position 10,000 too."""
    model = published_model("LlamaConfig", {**SIZES, "rope_parameters": LLAMA3_ROPE})
    model.save_pretrained(tmp_path)
    file = opened(tmp_path, convert(model))
    spec, expected = spec_from_gguf(file), spec_from_folder(tmp_path)
    assert isinstance(spec.layers[0].rope.scaling, FrequencyFactors)
    ours, theirs = (inverse_frequencies(s.layers[0].rope, s.head_dim) for s in (spec, expected))
    assert (ours != inverse_frequencies(replace(spec.layers[0].rope, scaling=None), 16)).any()
    assert ((ours - theirs).abs() * 10_000).max() < 1e-2
    assert load_fp32(file, spec).keys() == spec.tensor_shapes().keys()


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.BF16])
def test_half_precision_files_are_read_exactly(
    kind: GGMLQuantizationType, llama: Contents, llama_file: Path, tmp_path: Path
) -> None:
    dtype = torch.float16 if kind == GGMLQuantizationType.F16 else torch.bfloat16
    whole = GgufFile(llama_file)
    half = opened(tmp_path, llama, kind)
    spec = spec_from_gguf(half)
    expected = GgufWeights(whole, spec, dtype=dtype, device=CPU)
    for name, weight in GgufWeights(half, spec, dtype=dtype, device=CPU).items():
        assert weight.dtype == dtype
        assert torch.equal(weight, expected[name]), name


# Quantized weights

QUANTIZABLE = {"Q4_0": 0.14, "Q4_1": 0.08, "Q5_0": 0.07, "Q5_1": 0.04, "Q8_0": 0.01, "TQ1_0": 1, "TQ2_0": 1}
"""Type to the largest error, as a share of the block's largest number."""


@pytest.fixture(scope="module")
def wide(published_model: Build) -> Contents:
    """Rows of 256, so that every block size fits, and an embedding of more than one piece with an odd end."""
    sizes = {**SIZES, "vocab_size": 4099, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    assert PIECE_ELEMENTS < 4099 * 256 < PIECE_ELEMENTS + 1024
    model = published_model("Qwen3Config", {**sizes, "num_hidden_layers": 1, "tie_word_embeddings": True})
    contents = convert(model)
    return contents.but(metadata={"tokenizer.ggml.tokens": None})


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantized_weights_come_back_as_the_library_gives_them(
    name: str, wide: Contents, tmp_path: Path
) -> None:
    kind = GGMLQuantizationType[name]
    file = opened(tmp_path, wide, kind)
    weights = load_fp32(file, spec_from_gguf(file))
    for ours, theirs in {"embed": "token_embd.weight", "layers.0.down": "blk.0.ffn_down.weight"}.items():
        original = wide.tensors[theirs]
        expected = gguf.dequantize(gguf.quantize(original, kind), kind)
        assert np.array_equal(weights[ours].numpy(), expected)
        error = np.abs(weights[ours].numpy() - original).reshape(-1, 32).max(axis=1)
        assert (error <= QUANTIZABLE[name] * np.abs(original).max()).all()


def test_pieces_of_a_big_float32_tensor_are_put_together_in_order(wide: Contents, tmp_path: Path) -> None:
    file = opened(tmp_path, wide)
    weights = load_fp32(file, spec_from_gguf(file))
    assert np.array_equal(weights["embed"].numpy(), wide.tensors["token_embd.weight"])


# What cannot be loaded


ZEROS = np.zeros((3, 48), np.float32)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("token_embd.weight", None, "tensor token_embd.weight is missing"),
        ("blk.1.ffn_up.weight", None, "1 of 21 tensors are missing, first blk.1.ffn_up.weight"),
        ("output_norm.weight", None, "1 of 21 tensors are missing, first output_norm.weight"),
        ("blk.0.attn_k.weight", ZEROS, "blk.0.attn_k.weight has shape [3, 48], expected [32, 48]"),
        ("output.weight", ZEROS, "output.weight has shape [3, 48], expected [101, 48]"),
        ("blk.0.attn_norm.weight", ZEROS, "blk.0.attn_norm.weight has shape [3, 48], expected [48]"),
        ("blk.2.ffn_up.weight", ZEROS, "1 unexpected tensors, first 'blk.2.ffn_up.weight'"),
        ("blk.0.ffn_gate_exps.weight", ZEROS, "1 unexpected tensors, first 'blk.0.ffn_gate_exps.weight'"),
        (
            "blk.0.attn_q.bias",
            np.zeros(64, np.float32),
            "5 of 27 tensors are missing, first blk.0.attn_k.bias",
        ),
        ("blk.1.attn_q.bias", np.zeros(64, np.float32), "1 unexpected tensors, first 'blk.1.attn_q.bias'"),
        ("a\nname", ZEROS, r"1 unexpected tensors, first 'a\nname'"),
        (
            "blk.0.attn_norm.weight",
            np.zeros(48, np.float64),
            "tensor blk.0.attn_norm.weight has type F64, which cannot be read",
        ),
        (
            "blk.0.attn_norm.weight",
            np.zeros(48, np.int8),
            "tensor blk.0.attn_norm.weight has type I8, which cannot be read",
        ),
        ("rope_freqs.weight", np.ones(7, np.float32), "rope_freqs.weight has shape [7], expected [8]"),
        (
            "rope_freqs.weight",
            np.zeros(8, np.float32),
            "rope_freqs.weight holds numbers that are not positive",
        ),
        ("rope_freqs.weight", np.full(8, np.nan, np.float32), "holds numbers that are not positive"),
    ],
)
def test_a_tensor_that_does_not_belong_is_named(
    name: str, tensor: np.ndarray | None, problem: str, llama: Contents, tmp_path: Path
) -> None:
    assert problem in refusal(tmp_path, llama.but(tensors={name: tensor}))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "output_norm.weight"])
def test_a_weight_that_is_not_finite_is_damage(
    name: str, bad: float, llama: Contents, tmp_path: Path
) -> None:
    tensor = llama.tensors[name].copy()
    tensor.flat[3] = bad
    message = refusal(tmp_path, llama.but(tensors={name: tensor}))
    assert f"tensor {name} holds numbers that are not finite" in message


def test_a_damaged_scale_of_a_quantized_block_is_damage(wide: Contents, tmp_path: Path) -> None:
    file = opened(tmp_path, wide, GGMLQuantizationType.Q4_0)
    spec = spec_from_gguf(file)
    content = bytearray(file.path.read_bytes())
    tensor = file.tensors["blk.0.ffn_up.weight"]
    # The first two bytes of a Q4_0 block are its scale; 7c00 is infinity in float16.
    start = content.index(tensor.data.tobytes())
    content[start : start + 2] = b"\x00\x7c"
    file.path.with_name("damaged.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight holds numbers that are not finite"):
        load_fp32(GgufFile(file.path.with_name("damaged.gguf")), spec)


def test_a_table_of_frequencies_beside_another_scaling_is_refused(llama: Contents, tmp_path: Path) -> None:
    both = llama.but(
        metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        tensors={"rope_freqs.weight": np.ones(8, np.float32)},
    )
    assert "has both rope_freqs.weight and rope scaling linear" in refusal(tmp_path, both)


def test_a_helper_tensor_of_the_writing_program_is_skipped_with_a_word(
    llama: Contents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F-16"""
    file = opened(tmp_path, llama.but(tensors={"blk.0.attn_rot_embd.weight": np.ones(8, np.float32)}))
    spec = spec_from_gguf(file)
    with caplog.at_level(logging.INFO):
        assert load_fp32(file, spec).keys() == spec.tensor_shapes().keys()
    assert "1 tensors that change nothing are ignored, first blk.0.attn_rot_embd.weight" in caplog.text


@settings(max_examples=150, deadline=None)
@given(changes=st.lists(st.tuples(st.floats(0, 0.2), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_give_an_error_or_a_whole_model(
    llama_file: Path, changes: list[tuple[float, int]]
) -> None:
    """The first fifth of the file holds the metadata, the tensor table and some weights."""
    content = bytearray(llama_file.read_bytes())
    for share, value in changes:
        content[int(len(content) * share)] = value
    path = llama_file.with_name("changed.gguf")
    path.write_bytes(content)
    with suppress(ModelError):
        file = GgufFile(path)
        spec = spec_from_gguf(file)
        weights = load_fp32(file, spec)
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == spec.tensor_shapes()


# The published files


def test_the_demo_model_loads_in_seconds_and_as_the_library_reads_it(gemma_path: Path) -> None:
    demo = open_model(ModelFiles(name="demo", kind="gguf", path=gemma_path))
    started = time.monotonic()
    weights = demo.weights(dtype=torch.bfloat16, device=CPU)
    assert time.monotonic() - started < 20
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == demo.spec.tensor_shapes()
    assert demo.gguf is not None
    names = {
        "layers.3.down": "ffn_down",
        "layers.3.o": "attn_output",
        "layers.3.q": "attn_q",
        "layers.3.v": "attn_v",
    }
    for ours, theirs in names.items():
        tensor = demo.gguf.tensors[f"blk.3.{theirs}.weight"]
        expected = gguf.dequantize(tensor.data.reshape(tensor.shape[0], -1), tensor.kind)
        assert torch.equal(weights[ours], torch.from_numpy(expected).bfloat16()), tensor.kind


@pytest.mark.big
def test_the_coder_model_is_qwen_2_5_1_5b(qwen_path: Path) -> None:
    file = GgufFile(qwen_path)
    spec = spec_from_gguf(file)
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (
        "qwen2",
        151936,
        1536,
        8960,
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.num_layers) == (12, 2, 128, 28)
    assert (spec.qkv_bias, spec.o_bias, spec.tie_embeddings, spec.max_position) == (True, False, False, 32768)
    assert {(layer.window, layer.rope.base) for layer in spec.layers} == {(None, 1_000_000.0)}
    weights = GgufWeights(file, spec, dtype=torch.bfloat16, device=CPU)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == spec.tensor_shapes()


def test_a_folder_is_opened_by_its_config_and_safetensors(published_model: Build, tmp_path: Path) -> None:
    model = published_model(*MODELS["qwen2"])
    model.save_pretrained(tmp_path)
    ours = open_model(ModelFiles(name="tiny", kind="folder", path=tmp_path))
    assert (ours.gguf, ours.source, ours.spec) == (None, tmp_path, spec_from_folder(tmp_path))
    weights = ours.weights(dtype=torch.float32, device=CPU)
    assert torch.equal(weights["embed"], model.get_input_embeddings().weight.data)
