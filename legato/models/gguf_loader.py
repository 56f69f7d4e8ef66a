"""From an opened GGUF file and its `ModelSpec` to plain weights.

It knows llama.cpp's names of tensors and what its converter does to weights: q and k rows of `llama` are
reordered for a rotation of neighbouring pairs and are put back here; Gemma's norm gains have their 1 added
already. It knows neither the container (`gguf_file`) nor the metadata (`gguf_spec`). Weights are dequantized
piece by piece, so that the peak is the loaded model and a few MB.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from legato.errors import ModelError
from legato.models.gguf_file import GgufFile, GgufTensor
from legato.models.gguf_spec import EMBEDDING, HEAD, ROPE_FACTORS, architecture_of
from legato.models.gguf_tensor import ROW_ELEMENTS, check_tensor, dequantize_piece
from legato.models.spec import ModelSpec

_log = logging.getLogger(__name__)

# Legato's name of a tensor to the file's: of the model, and of each layer below "blk.N.".
_MODEL_NAMES = {"embed": EMBEDDING, "final_norm": "output_norm.weight", "lm_head": HEAD}
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
# Tables that only the rotation of the writing program needs.
_HARMLESS = re.compile(rf"{re.escape(ROPE_FACTORS)}|blk\.\d+\.attn_rot_embd\.weight")

PIECE_ELEMENTS = 128 * ROW_ELEMENTS
LOAD_THREADS = 2


class GgufWeights(Mapping[str, Tensor]):
    """Every tensor of a spec under Legato's name, dequantized when it is asked for and not kept.

    So a model that packs its matrices in a form of its own never has all of them twice in memory.
    """

    def __init__(self, file: GgufFile, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        """Tensors come as `dtype` on `device`. Names, shapes and types of all are checked here; ModelError:
        one is missing, has another shape or a type that cannot be dequantized, or is not known."""
        self._file, self._spec, self._dtype, self._device = file, spec, dtype, device
        self._neighbour_pairs = architecture_of(file).neighbour_pairs
        shapes = spec.tensor_shapes()
        self._sources = {name: _gguf_name(name) for name in shapes}
        _check_names(file, list(self._sources.values()))
        for name, source in self._sources.items():
            check_tensor(file.tensors[source], shapes[name])
        self._pool = ThreadPoolExecutor(LOAD_THREADS)

    def __getitem__(self, name: str) -> Tensor:
        """Raises ModelError if the tensor holds numbers that are not finite."""
        weight = _to_torch(self._file.tensors[self._sources[name]], self._dtype, self._pool)
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


def _to_torch(tensor: GgufTensor, dtype: torch.dtype, pool: ThreadPoolExecutor) -> Tensor:
    """The dequantized tensor on the host. Pieces are converted side by side: numpy lets go of the GIL."""
    weight = torch.empty(tensor.shape, dtype=dtype)
    flat = weight.view(-1)

    def fill(start: int) -> None:
        end = min(start + PIECE_ELEMENTS, flat.numel())
        values = torch.from_numpy(dequantize_piece(tensor, start, end))
        # One bad number makes the sum bad, and a sum costs less than looking at each.
        if not values.sum().isfinite():
            raise ModelError(
                f"{tensor.path}: damaged: tensor {tensor.name} holds numbers that are not finite"
            )
        flat[start:end] = values

    list(pool.map(fill, range(0, flat.numel(), PIECE_ELEMENTS)))
    return weight


def _halves_from_neighbours(weight: Tensor, name: str, spec: ModelSpec) -> Tensor:
    """Rows of q and k put back from pairs (2i, 2i + 1) of a head to pairs (i, i + head_dim / 2)."""
    part = name.removesuffix(".bias").rpartition(".")[2]
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(part)
    if heads is None:
        return weight
    pairs = weight.view(heads, spec.head_dim // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight.shape)
