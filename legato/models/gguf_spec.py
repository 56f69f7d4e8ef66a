"""From the metadata of a GGUF file to a `ModelSpec`, for llama, qwen2, qwen3 and gemma3.

It knows llama.cpp's keys. Those that change what is computed are obeyed or refused by name. A key of the
architecture that is not known is refused too, since it may change the computation. It reads no weights but
the table of rope factors.
"""

from dataclasses import dataclass
from math import log

import numpy as np

from legato.errors import ModelError
from legato.models.gguf_file import GgufFile, Value
from legato.models.gguf_tensor import check_tensor, dequantize_piece
from legato.models.spec import (
    Activation,
    Family,
    FrequencyFactors,
    LayerSpec,
    LinearScaling,
    ModelSpec,
    RopeScaling,
    RopeSpec,
    YarnScaling,
    longest_context,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a value of `general.architecture` fixes without a key in the file."""

    family: Family
    activation: Activation = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    neighbour_pairs: bool = False
    """The rows of q and k are ordered for a rotation of (2i, 2i + 1)."""


_ARCHITECTURES = {
    "llama": Architecture(family="llama", neighbour_pairs=True),
    "qwen2": Architecture(family="qwen2"),
    "qwen3": Architecture(family="qwen3", qk_norm=True),
    "gemma3": Architecture(family="gemma3", activation="gelu_tanh", qk_norm=True, post_norms=True),
}

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"

GEMMA_PERIOD = 6
GEMMA_LOCAL_BASE = 10_000.0
GEMMA_27B_LAYERS = 62

# Keys of the architecture that change no logits: sizes said twice, notes, and what only embedding models use.
_WITHOUT_EFFECT = (
    "attention.layer_norm_epsilon",
    "classifier.output_labels",
    "decoder_start_token_id",
    "expert_used_count",
    "pooling_type",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "vocab_size",
)


def spec_from_gguf(file: GgufFile) -> ModelSpec:
    """The model that the metadata and the tensor names of `file` describe.

    Raises ModelError: an unknown architecture or key, a missing or absurd number, an unsupported feature.
    """
    architecture = architecture_of(file)
    gemma = architecture.family == "gemma3"
    keys = _Keys(file)
    hidden, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    num_kv_heads = keys.integer("attention.head_count_kv", num_heads)
    head_dim = keys.integer("attention.key_length", hidden // num_heads)
    _check_heads(keys, num_heads, num_kv_heads, head_dim)
    is_gemma_27b = gemma and keys.integer("block_count") == GEMMA_27B_LAYERS
    attention_scale = (hidden / num_heads if is_gemma_27b else head_dim) ** -0.5
    scaling = _rope_scaling(keys, head_dim)
    max_position = longest_context(keys.integer("context_length"), scaling)
    spec = ModelSpec(
        family=architecture.family,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=_layers(keys, architecture, scaling, max_position),
        max_position=max_position,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        activation=architecture.activation,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=architecture.qk_norm,
        post_norms=architecture.post_norms,
        tie_embeddings=HEAD not in file.tensors,
        embedding_scale=keys.number_or_none("embedding_scale") or (hidden**0.5 if gemma else 1.0),
        attention_scale=keys.number_or_none("attention.scale") or attention_scale,
        attention_softcap=keys.number_or_none("attn_logit_softcapping"),
        residual_scale=keys.number_or_none("residual_scale") or 1.0,
        logit_scale=keys.number_or_none("logit_scale") or 1.0,
        logit_softcap=keys.number_or_none("final_logit_softcapping"),
    )
    keys.refuse_others()
    return spec


def architecture_of(file: GgufFile) -> Architecture:
    """Raises ModelError for one that is not supported."""
    name = file.architecture
    if name not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{file.path}: architecture {name[:80]!r} is not supported (supported: {supported})")
    return _ARCHITECTURES[name]


class _Keys:
    """Checked reads of the keys `ARCHITECTURE.*`. It remembers which keys were read."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._read: set[str] = set()

    def full(self, key: str) -> str:
        """The key with its architecture, noted as read."""
        full = f"{self.file.architecture}.{key}"
        self._read.add(full)
        return full

    def has(self, key: str) -> bool:
        return self.full(key) in self.file.metadata

    def value(self, key: str) -> Value | None:
        """Of any type; None if it is absent."""
        return self.file.metadata.get(self.full(key))

    def text(self, key: str, default: str) -> str:
        return self.file.get(self.full(key), str, default)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.file.get(self.full(key), int, default)
        if not least <= value < 2**31:
            raise ModelError(
                f"{self.file.path}: {self.full(key)} is {value}, not within {least} .. {2**31 - 1}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.get(self.full(key), float, default)
        if not 0.0 < value < float("inf"):
            raise ModelError(f"{self.file.path}: {self.full(key)} is {value}, not a positive number")
        return value

    def number_or_none(self, key: str) -> float | None:
        """None if it is absent or 0, which means the same to llama.cpp."""
        return None if self.value(key) in (None, 0) else self.number(key)

    def only(self, key: str, supported: int | float | bool) -> None:
        """Refuse a file whose `key` is there and has another value than the one supported."""
        value = self.file.get(self.full(key), type(supported), supported)
        if value != supported:
            raise ModelError(f"{self.file.path}: {self.full(key)} is {value}; only {supported} is supported")

    def refuse_others(self) -> None:
        """Refuse keys of the architecture that nobody has read."""
        prefix = f"{self.file.architecture}."
        known = self._read | {prefix + key for key in _WITHOUT_EFFECT}
        others = [key for key in self.file.metadata if key.startswith(prefix) and key not in known]
        if others:
            raise ModelError(
                f"{self.file.path}: metadata key {others[0][:80]!r} is not supported, and it may change what "
                f"the model computes ({len(others)} such keys of this architecture)"
            )


def _check_heads(keys: _Keys, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        keys.only(key, head_dim)
        keys.only(f"{key}_swa", head_dim)
    keys.only("attention.key_length_swa", head_dim)
    keys.only("expert_count", 0)
    keys.only("attention.causal", True)
    keys.only("use_parallel_residual", False)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"{keys.file.path}: {num_heads} heads over {num_kv_heads} kv heads of size {head_dim}: "
            "heads must be a multiple of kv heads, and the size even"
        )


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: every token of the tokenizer has one."""
    embed = file.tensors.get(EMBEDDING)
    if embed is None:
        raise ModelError(f"{file.path}: tensor {EMBEDDING} is missing")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embed.shape[0]:
        raise ModelError(
            f"{file.path}: the tokenizer has {len(tokens)} tokens, the embedding only {embed.shape[0]} rows"
        )
    return embed.shape[0]


def _layers(
    keys: _Keys, architecture: Architecture, scaling: RopeScaling | None, max_position: int
) -> tuple[LayerSpec, ...]:
    count = keys.integer("block_count")
    # Before a tuple of that length is built; a layer has more than one tensor.
    if count > len(keys.file.tensors):
        raise ModelError(
            f"{keys.file.path}: claims {count} layers, but has {len(keys.file.tensors)} tensors in all"
        )
    rope = RopeSpec(base=keys.number("rope.freq_base", 10_000.0), scaling=scaling)
    window = keys.integer("attention.sliding_window", 0, least=0)
    slides = _slides(keys, count, GEMMA_PERIOD if architecture.family == "gemma3" else None)
    whole = LayerSpec(rope=rope)
    if architecture.family == "gemma3":
        base = keys.number("rope.freq_base_swa", GEMMA_LOCAL_BASE)
        local = LayerSpec(rope=RopeSpec(base=base), window=window)
    else:
        local = LayerSpec(rope=rope, window=window)
        # A window over the longest context hides nothing: Qwen's files say one that is not in use.
        window = 0 if window >= max_position else window
    return tuple(local if window and slide else whole for slide in slides)


def _slides(keys: _Keys, count: int, default_period: int | None) -> list[bool]:
    """Whether each layer has the sliding window, if there is one: all, but for what a pattern says."""
    key = "attention.sliding_window_pattern"
    listed = keys.value(key)
    if isinstance(listed, list):
        if len(listed) != count or any(value not in (0, 1) for value in listed):
            raise ModelError(
                f"{keys.file.path}: {keys.full(key)} has {len(listed)} values; "
                f"{count} are needed, one for each layer, each true or false"
            )
        return [bool(value) for value in listed]
    if listed is None and default_period is None:
        return [True] * count
    period = keys.integer(key, default_period)
    return [(i + 1) % period != 0 for i in range(count)]


def _rope_scaling(keys: _Keys, head_dim: int) -> RopeScaling | None:
    """The scaling of layers without a window. An absent type means linear; factor 0 or absent means none."""
    file = keys.file
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number_or_none("rope.scaling.factor") or keys.number_or_none("rope.scale_linear") or 1.0
    yarn = _yarn(keys, factor)
    scaling: RopeScaling | None = None
    match kind:
        case "none":
            pass
        case "linear":
            scaling = LinearScaling(factor=factor) if factor != 1.0 else None
        case "yarn":
            scaling = yarn if factor != 1.0 or yarn.attention_factor != 1.0 else None
        case _:
            raise ModelError(
                f"{file.path}: rope scaling {kind[:80]!r} is not supported (supported: none, linear, yarn)"
            )
    if kind != "yarn":
        keys.only("rope.scaling.attn_factor", 1.0)
    table = file.tensors.get(ROPE_FACTORS)
    if table is None:
        return scaling
    if scaling is not None:
        raise ModelError(
            f"{file.path}: has both {ROPE_FACTORS} and rope scaling {kind}; only one is supported"
        )
    check_tensor(table, (head_dim // 2,))
    factors = dequantize_piece(table, 0, head_dim // 2)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"{table.path}: tensor {ROPE_FACTORS} holds numbers that are not positive")
    return FrequencyFactors(factors=tuple(factors.tolist()))


def _yarn(keys: _Keys, factor: float) -> YarnScaling:
    """The YaRN that the keys describe, as the published model has it.

    The converter writes `attention_factor` of config.json as `yarn_attn_factor`. Where it is absent, cos and
    sin are multiplied by (1 + 0.1 ln(factor)) / (1 + 0.1 m ln(factor)), where m is `yarn_log_multiplier` or 0
    (`mscale_all_dim` of config.json; Mistral's files have 1, which gives a factor of 1). `attn_factor`
    multiplies the result.
    """
    keys.only("rope.scaling.yarn_ext_factor", 1.0)
    growth = 0.1 * log(factor) if factor > 1 else 0.0
    multiplier = keys.number_or_none("rope.scaling.yarn_log_multiplier") or 0.0
    stated = keys.number_or_none("rope.scaling.yarn_attn_factor")
    attention_factor = stated or (1.0 + growth) / (1.0 + multiplier * growth)
    attention_factor *= keys.number_or_none("rope.scaling.attn_factor") or 1.0
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    beta_fast = keys.number("rope.scaling.yarn_beta_fast", 32.0)
    beta_slow = keys.number("rope.scaling.yarn_beta_slow", 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention_factor,
    )
