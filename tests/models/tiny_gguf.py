"""Writes tiny GGUF files for tests, with the `gguf` library: from any contents, or from a transformers model.

A transformers model is turned into what llama.cpp's converter would make of it: names by that library's own
table, q and k rows of Llama in the order of neighbouring pairs, 1 added to Gemma's norm gains.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from legato.models.gguf_file import GgufFile

Metadata = dict[str, object]
Tensors = dict[str, np.ndarray]

SIZES: dict[str, object] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not 48 / 4
    "max_position_embeddings": 4096,
}
"""Of a tiny transformers model."""
YARN_KEYS = {
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a GGUF file is to hold."""

    architecture: str
    metadata: Metadata
    tensors: Tensors

    def but(
        self, *, metadata: Mapping[str, object] | None = None, tensors: Tensors | None = None
    ) -> "Contents":
        """The same with some entries replaced; None takes one away."""
        return Contents(
            architecture=self.architecture,
            metadata={k: v for k, v in (self.metadata | dict(metadata or {})).items() if v is not None},
            tensors={k: v for k, v in (self.tensors | (tensors or {})).items() if v is not None},
        )


def write_gguf(
    path: Path, contents: Contents, *, kind: GGMLQuantizationType | None = None, split: int = 0
) -> Path:
    """Write the file; matrices are quantized to `kind` if it is given, vectors stay as they are.

    `split`: most tensors in one part of a split model, whose parts lie beside `path`.
    """
    writer = gguf.GGUFWriter(path, contents.architecture, split_max_tensors=split)
    for key, value in contents.metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, tensor in contents.tensors.items():
        if kind is None or tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(folder: Path, contents: Contents, kind: GGMLQuantizationType | None = None) -> GgufFile:
    return GgufFile(write_gguf(folder / "model.gguf", contents, kind=kind))


def convert(model: PreTrainedModel) -> Contents:
    """The contents of the GGUF file of a causal language model, as float32."""
    config = model.config
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config.num_hidden_layers,
    )
    tensors: Tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        part = name.split(".")[-2]
        if architecture == "llama" and part in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
            weight = weight[neighbour_order(heads, config.head_dim)]
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        tensors[gguf_name] = weight.float().numpy().copy()  # the model may change later
    rope = config.rope_parameters
    metadata = _sizes(config, architecture) | _rope(rope.get("full_attention", rope), architecture)
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(config)
    return Contents(architecture=architecture, metadata=metadata, tensors=tensors)


def neighbour_order(heads: int, head_dim: int) -> list[int]:
    """Row 2i of a head is its row i of the published model, row 2i + 1 is its row i + head_dim / 2."""
    half = head_dim // 2
    return [
        head * head_dim + i + side * half for head in range(heads) for i in range(half) for side in (0, 1)
    ]


def llama3_factors(config: object) -> np.ndarray:
    """What each frequency is divided by, from the published implementation of Llama 3.1's scaling."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return (config.rope_parameters["rope_theta"] ** -half / scaled).numpy()


def _sizes(config: object, architecture: str) -> Metadata:
    values: Metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if architecture == "gemma3":
        values["attention.sliding_window"] = config.sliding_window
        if config.final_logit_softcapping:
            values["final_logit_softcapping"] = config.final_logit_softcapping
    tokens = [f"token {i}" for i in range(config.vocab_size)]
    return {f"{architecture}.{key}": value for key, value in values.items()} | {
        "tokenizer.ggml.tokens": tokens
    }


def _rope(rope: Mapping[str, object], architecture: str) -> Metadata:
    values: Metadata = {"rope.freq_base": rope["rope_theta"]}
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for key, name in YARN_KEYS.items():
            if rope.get(key) is not None:
                values[f"rope.scaling.{name}"] = rope[key]
    return {f"{architecture}.{key}": value for key, value in values.items()}
