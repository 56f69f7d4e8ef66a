"""From an opened GGUF file to a `ModelSpec` and to plain weights, for llama, qwen2, qwen3 and gemma3.

It knows llama.cpp's names and what its converter does to weights: q and k rows of `llama` are reordered for a
rotation of neighbouring pairs and are put back here; Gemma's norm gains have their 1 added already. It knows
neither the container (`gguf_file`) nor what the numbers are used for. Weights are dequantized by the `gguf`
library, piece by piece, so that the peak is the loaded model and a few MB.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from legato.errors import ModelError
from legato.models.gguf_file import GgufFile, GgufTensor
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
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """What a value of `general.architecture` fixes without a key in the file."""

    family: Family
    activation: Activation = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    neighbour_pairs: bool = False
    """The rows of q and k are ordered for a rotation of (2i, 2i + 1)."""


_ARCHITECTURES = {
    "llama": _Architecture(family="llama", neighbour_pairs=True),
    "qwen2": _Architecture(family="qwen2"),
    "qwen3": _Architecture(family="qwen3", qk_norm=True),
    "gemma3": _Architecture(family="gemma3", activation="gelu_tanh", qk_norm=True, post_norms=True),
}

# Legato's name of a tensor to the file's: of the model, and of each layer below "blk.N.".
_MODEL_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
_LAYER_NAMES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "post_attention_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
ROPE_FACTORS = "rope_freqs.weight"
# Tables that only the rotation of the writing program needs.
_HARMLESS = re.compile(rf"{re.escape(ROPE_FACTORS)}|blk\.\d+\.attn_rot_embd\.weight")

GEMMA_PERIOD = 6
GEMMA_LOCAL_BASE = 10_000.0
GEMMA_27B_LAYERS = 62

# A multiple of every block size; rows of this length are what numpy handles fastest in the gguf library.
ROW_ELEMENTS = 8192
PIECE_ELEMENTS = 128 * ROW_ELEMENTS
LOAD_THREADS = 2


def spec_from_gguf(file: GgufFile) -> ModelSpec:
    """The model that the metadata and the tensor names of `file` describe.

    Raises ModelError: an unknown architecture, a missing or absurd number, a feature that cannot be served.
    """
    architecture = _architecture(file)
    keys = _Keys(file)
    hidden, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    num_kv_heads = keys.integer("attention.head_count_kv", num_heads)
    head_dim = keys.integer("attention.key_length", hidden // num_heads)
    keys.only("attention.value_length", head_dim)
    keys.only("rope.dimension_count", head_dim)
    keys.only("expert_count", 0)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"{file.path}: {num_heads} heads over {num_kv_heads} kv heads of size {head_dim}: "
            "heads must be a multiple of kv heads, and the size even"
        )
    is_gemma_27b = architecture.family == "gemma3" and keys.integer("block_count") == GEMMA_27B_LAYERS
    return ModelSpec(
        family=architecture.family,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=_layers(keys, architecture, head_dim),
        max_position=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        activation=architecture.activation,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=architecture.qk_norm,
        post_norms=architecture.post_norms,
        tie_embeddings=_MODEL_NAMES["lm_head"] not in file.tensors,
        embedding_scale=hidden**0.5 if architecture.family == "gemma3" else 1.0,
        attention_scale=(hidden / num_heads if is_gemma_27b else head_dim) ** -0.5,
        logit_softcap=keys.number_or_none("final_logit_softcapping"),
    )


class GgufWeights(Mapping[str, Tensor]):
    """Every tensor of a spec under Legato's name, dequantized when it is asked for and not kept.

    So a model that packs its matrices in a form of its own never has all of them twice in memory.
    """

    def __init__(self, file: GgufFile, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        """Tensors come as `dtype` on `device`. Names, shapes and types of all are checked here; ModelError:
        one is missing, has another shape or a type that cannot be dequantized, or is not known."""
        self._file, self._spec, self._dtype, self._device = file, spec, dtype, device
        self._neighbour_pairs = _architecture(file).neighbour_pairs
        shapes = spec.tensor_shapes()
        self._sources = {name: _gguf_name(name) for name in shapes}
        _check_names(file, list(self._sources.values()))
        for name, source in self._sources.items():
            _check_tensor(file, file.tensors[source], shapes[name])
        self._pool = ThreadPoolExecutor(LOAD_THREADS)

    def __getitem__(self, name: str) -> Tensor:
        """Raises ModelError if the tensor holds numbers that are not finite."""
        weight = _to_torch(self._file, self._file.tensors[self._sources[name]], self._dtype, self._pool)
        if self._neighbour_pairs:
            weight = _halves_from_neighbours(weight, name, self._spec)
        return weight.to(self._device)

    def pop(self, name: str) -> Tensor:
        """The tensor, which is no longer one of these then."""
        weight = self[name]
        del self._sources[name]
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


class _Keys:
    """Checked reads of the keys `ARCHITECTURE.*`."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def _full(self, key: str) -> str:
        return f"{self.file.architecture}.{key}"

    def text(self, key: str, default: str) -> str:
        return self.file.get(self._full(key), str, default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.file.get(self._full(key), int, default)
        if not 0 < value < 2**31:
            raise ModelError(f"{self.file.path}: {self._full(key)} is {value}, not within 1 .. {2**31 - 1}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.get(self._full(key), float, default)
        if not 0.0 < value < float("inf"):
            raise ModelError(f"{self.file.path}: {self._full(key)} is {value}, not a positive number")
        return value

    def number_or_none(self, key: str) -> float | None:
        return self.number(key) if self._full(key) in self.file.metadata else None

    def only(self, key: str, supported: int) -> None:
        """Refuse a file whose `key` is there and has another value than the one supported."""
        value = self.file.get(self._full(key), int, supported)
        if value != supported:
            raise ModelError(f"{self.file.path}: {self._full(key)} is {value}; only {supported} is supported")


def _architecture(file: GgufFile) -> _Architecture:
    name = file.architecture
    if name not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{file.path}: architecture {name[:80]!r} is not supported (supported: {supported})")
    return _ARCHITECTURES[name]


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: every token of the tokenizer has one."""
    embed = file.tensors.get(_MODEL_NAMES["embed"])
    if embed is None:
        raise ModelError(f"{file.path}: tensor {_MODEL_NAMES['embed']} is missing")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embed.shape[0]:
        raise ModelError(
            f"{file.path}: the tokenizer has {len(tokens)} tokens, the embedding only {embed.shape[0]} rows"
        )
    return embed.shape[0]


def _layers(keys: _Keys, architecture: _Architecture, head_dim: int) -> tuple[LayerSpec, ...]:
    count = keys.integer("block_count")
    # Before a tuple of that length is built; a layer has more than one tensor.
    if count > len(keys.file.tensors):
        raise ModelError(
            f"{keys.file.path}: claims {count} layers, but has {len(keys.file.tensors)} tensors in all"
        )
    base = keys.number("rope.freq_base", 10_000.0)
    whole = LayerSpec(rope=RopeSpec(base=base, scaling=_rope_scaling(keys, head_dim)))
    window = keys.file.get(f"{keys.file.architecture}.attention.sliding_window", int, 0)
    # Files of other families may carry the key too, and llama.cpp does not obey it there.
    if architecture.family != "gemma3" or window <= 0:
        return (whole,) * count
    local_base = keys.number("rope.freq_base_swa", GEMMA_LOCAL_BASE)
    local = LayerSpec(rope=RopeSpec(base=local_base), window=window)
    period = keys.integer("attention.sliding_window_pattern", GEMMA_PERIOD)
    return tuple(whole if (i + 1) % period == 0 else local for i in range(count))


def _rope_scaling(keys: _Keys, head_dim: int) -> RopeScaling | None:
    """The scaling of layers without a window. An absent type means linear; factor 0 or absent means none."""
    file = keys.file
    kind = keys.text("rope.scaling.type", "linear")
    factor = file.get(f"{file.architecture}.rope.scaling.factor", float, 0.0) or 1.0
    scaling: RopeScaling | None
    if kind == "none" or factor == 1.0:
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(factor=keys.number("rope.scaling.factor"))
    elif kind == "yarn":
        scaling = _yarn(keys)
    else:
        raise ModelError(
            f"{file.path}: rope scaling {kind[:80]!r} is not supported (supported: none, linear, yarn)"
        )
    table = file.tensors.get(ROPE_FACTORS)
    if table is None:
        return scaling
    if scaling is not None:
        raise ModelError(
            f"{file.path}: has both {ROPE_FACTORS} and rope scaling {kind}; only one is supported"
        )
    _check_tensor(file, table, (head_dim // 2,))
    factors = _dequantize_piece(table, 0, head_dim // 2)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"{file.path}: tensor {ROPE_FACTORS} holds numbers that are not positive")
    return FrequencyFactors(factors=tuple(factors.tolist()))


def _yarn(keys: _Keys) -> YarnScaling:
    """YaRN as ggml applies it: cos and sin grow by 1 + 0.1 ln(factor), times the file's own factors."""
    factor = keys.number("rope.scaling.factor")
    given = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise ModelError(f"{keys.file.path}: YaRN with an extrapolation factor other than 1 is not supported")
    return YarnScaling(
        factor=factor,
        original_max_position=keys.integer(
            "rope.scaling.original_context_length", keys.integer("context_length")
        ),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=given * (1.0 + 0.1 * float(np.log(factor))),
    )


def _gguf_name(name: str) -> str:
    """`layers.3.q` -> `blk.3.attn_q.weight`, `layers.3.q.bias` -> `blk.3.attn_q.bias`."""
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    _, layer, part, *suffix = name.split(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix[0] if suffix else 'weight'}"


def _check_names(file: GgufFile, expected: list[str]) -> None:
    missing = [name for name in expected if name not in file.tensors]
    if missing:
        raise ModelError(
            f"{file.path}: {len(missing)} of {len(expected)} tensors are missing, first {missing[0]}"
        )
    known = set(expected)
    beside = [name for name in file.tensors if name not in known]
    extra = [name for name in beside if not _HARMLESS.fullmatch(name)]
    if extra:
        raise ModelError(f"{file.path}: {len(extra)} unexpected tensors, first {extra[0][:80]!r}")
    if ignored := [name for name in beside if name != ROPE_FACTORS]:
        _log.info(
            "%s: %d tensors that change nothing are ignored, first %s", file.path, len(ignored), ignored[0]
        )


def _check_tensor(file: GgufFile, tensor: GgufTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelError(
            f"{file.path}: tensor {tensor.name} has shape {list(tensor.shape)}, expected {list(shape)}"
        )
    try:
        _, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        dequantize(np.zeros((1, block_bytes), np.uint8), tensor.kind)
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: tensor {tensor.name} has type {tensor.kind.name}, which cannot be read"
        ) from None


def _to_torch(file: GgufFile, tensor: GgufTensor, dtype: torch.dtype, pool: ThreadPoolExecutor) -> Tensor:
    """The dequantized tensor on the host. Pieces are converted side by side: numpy lets go of the GIL."""
    weight = torch.empty(tensor.shape, dtype=dtype)
    flat = weight.view(-1)

    def fill(start: int) -> None:
        end = min(start + PIECE_ELEMENTS, flat.numel())
        values = torch.from_numpy(_dequantize_piece(tensor, start, end))
        # One bad number makes the sum bad, and a sum costs less than looking at each.
        if not values.sum().isfinite():
            raise ModelError(f"{file.path}: damaged: tensor {tensor.name} holds numbers that are not finite")
        flat[start:end] = values

    list(pool.map(fill, range(0, flat.numel(), PIECE_ELEMENTS)))
    return weight


def _dequantize_piece(tensor: GgufTensor, start: int, end: int) -> npt.NDArray[np.float32]:
    """Elements start .. end (whole blocks) of the flat tensor, as a float32 array of its own."""
    block_elements, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    data = tensor.data[start // block_elements * block_bytes : end // block_elements * block_bytes]
    rows = (end - start) // ROW_ELEMENTS if (end - start) % ROW_ELEMENTS == 0 else 1
    # Damaged block scales are infinite or not a number: whoever takes the values looks for that.
    with np.errstate(all="ignore"):
        values = dequantize(data.reshape(rows, -1), tensor.kind).reshape(-1)
    # float32 data comes back as a view of the mapped file.
    return np.require(values, np.float32, ["ALIGNED", "WRITEABLE"])


def _halves_from_neighbours(weight: Tensor, name: str, spec: ModelSpec) -> Tensor:
    """Rows of q and k put back from pairs (2i, 2i + 1) of a head to pairs (i, i + head_dim / 2)."""
    part = name.removesuffix(".bias").rpartition(".")[2]
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(part)
    if heads is None:
        return weight
    pairs = weight.view(heads, spec.head_dim // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight.shape)
