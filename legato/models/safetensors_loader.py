"""From a folder of safetensors in Hugging Face form to the tensors that a `ModelSpec` asks for.

Every tensor is accounted for before the first one is read: there, of the right shape, in a float type, and no
unknown one beside it, so a model never starts half filled. Then each is read when it is asked for, so that
the peak is the loaded model and one tensor. It knows names and files, not what a decoder does.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from legato.errors import ModelError
from legato.models.spec import ModelSpec
from legato.text.json_object import read_json_object

_log = logging.getLogger(__name__)

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F16", "BF16", "F32")
ROWS_COMPARED = 4096
MOST_NAMED = 20
"""Missing files in one message."""

# Where the decoder's tensors and the LM head stand: text models; Gemma 3 with vision, older and newer.
_PLACES = (
    ("model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
)
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")

_PUBLISHED = {
    "embed": "embed_tokens",
    "final_norm": "norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
# With a norm on either side of attention and MLP, the published name of one of them means another.
_PUBLISHED_WITH_POST_NORMS = _PUBLISHED | {
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a file's header says about one tensor."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class SafetensorsWeights(Mapping[str, Tensor]):
    """Every tensor of a spec under Legato's name, read when it is asked for and not kept."""

    def __init__(self, folder: Path, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        """Tensors come as copies in `dtype` on `device`; norm gains are fp32 whatever `dtype` is.

        Names, shapes and types of all are checked here, by the headers of the files. Where `spec` ties the
        embedding, an LM head in the files is ignored, for it is equal (`with_own_head`). Raises ModelError,
        naming file and tensor, for files that are missing, damaged, or do not fit `spec`.
        """
        self._spec, self._dtype, self._device = spec, dtype, device
        stored = _survey(folder)
        body, head = _place(stored)
        self._published = {name: _published_name(name, spec, body, head) for name in spec.tensor_shapes()}
        ignored = stored.keys() - set(self._published.values())
        ignored = {name for name in ignored if _is_ignorable(name, spec, head)}
        self._stored = {name: tensor for name, tensor in stored.items() if name not in ignored}
        _check(folder, spec, self._published, self._stored)
        if ignored:
            _log.info(
                "%s: %d tensors that change nothing are ignored, first %s",
                folder,
                len(ignored),
                _shown(min(ignored)),
            )

    def __getitem__(self, name: str) -> Tensor:
        """Raises ModelError if the file cannot be read or the tensor holds numbers that are not finite."""
        published = self._published[name]
        path = self._stored[published].path
        with _opened(path) as file:
            weight = _converted(name, file.get_tensor(published), self._spec, self._dtype, self._device)
        # One bad number makes the sum bad, and a sum costs less than looking at each.
        if not weight.sum(dtype=torch.float32).isfinite():
            kind = str(weight.dtype).removeprefix("torch.")
            raise ModelError(f"{path}: tensor {published} holds numbers that are not finite as {kind}")
        return weight

    def pop(self, name: str) -> Tensor:
        """The tensor, which is no longer one of these then."""
        weight = self[name]
        del self._published[name]
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._published)

    def __len__(self) -> int:
        return len(self._published)


def _survey(folder: Path) -> dict[str, _Stored]:
    """Every tensor in the model's files, by its published name, from the headers alone."""
    if (folder / _SINGLE).is_file():
        files, listed = {_SINGLE}, {}
    elif (folder / _INDEX).is_file():
        listed = _read_index(folder / _INDEX)
        files = set(listed.values())
    else:
        raise ModelError(f"{folder}: has neither {_SINGLE} nor {_INDEX}")
    present = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    if missing := sorted(files - present):
        raise ModelError(
            f"{folder}: {len(missing)} of the {len(files)} files that {_INDEX} names are missing (an "
            f"incomplete download?): {', '.join(missing[:MOST_NAMED])}"
        )
    if unused := sorted(present - files):
        _log.warning("%s: files that are no part of the model are ignored: %s", folder, ", ".join(unused))
    stored: dict[str, _Stored] = {}
    for path in sorted(folder / name for name in files):
        with _opened(path) as file:
            for name in sorted(file.keys()):
                if name in stored:
                    raise ModelError(f"{path}: tensor {_shown(name)} is also in {stored[name].path.name}")
                header = file.get_slice(name)
                stored[name] = _Stored(path, header.get_dtype(), tuple(header.get_shape()))
    for name, file_name in listed.items():
        if name not in stored or stored[name].path.name != file_name:
            raise ModelError(f"{folder / file_name}: holds no tensor {_shown(name)}, though {_INDEX} says so")
    return stored


def _read_index(path: Path) -> dict[str, str]:
    """Published tensor name -> name of the file in the same folder."""
    index = read_json_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise index.error("weight_map", "an object that maps each tensor to a file")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{path}: weight_map gives {_shown(tensor)} the file {file!r:.100}; "
                "the plain name of a .safetensors file is needed"
            )
    return weight_map


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A `safe_open` (whose methods carry no types), its header checked against the file's size."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{path}: not a whole safetensors file ({reason[:200]})") from error


def _place(stored: dict[str, _Stored]) -> tuple[str, str]:
    """The prefix of the decoder's tensors, and the LM head's name."""
    for body, head in _PLACES:
        if f"{body}embed_tokens.weight" in stored:
            return body, head
    return _PLACES[0]


def _published_name(name: str, spec: ModelSpec, body: str, head: str) -> str:
    if name == "lm_head":
        return head
    names = _PUBLISHED_WITH_POST_NORMS if spec.post_norms else _PUBLISHED
    if name in names:
        return f"{body}{names[name]}.weight"
    _, layer, part, *bias = name.split(".")
    return f"{body}layers.{layer}.{names[part]}.{'bias' if bias else 'weight'}"


def _is_ignorable(name: str, spec: ModelSpec, head: str) -> bool:
    """Whether a tensor that `spec` does not ask for is known to change nothing."""
    vision = spec.family == "gemma3" and name.startswith(_VISION)
    return vision or name.endswith(".rotary_emb.inv_freq") or (spec.tie_embeddings and name == head)


def _check(folder: Path, spec: ModelSpec, published: dict[str, str], stored: dict[str, _Stored]) -> None:
    """Refuse types that are not plain floats, tensors missing or unknown, and wrong shapes, in this order.

    `published`: Legato's name to the file's.
    """
    for name, tensor in stored.items():
        if tensor.dtype not in _DTYPES:
            raise ModelError(
                f"{tensor.path}: tensor {_shown(name)} has type {tensor.dtype}; "
                f"supported: {', '.join(_DTYPES)} (quantized models as GGUF only)"
            )
    shapes = spec.tensor_shapes()
    for ours, name in published.items():
        if name not in stored:
            hint = ", and the config does not tie it to the embedding" if ours == "lm_head" else ""
            raise ModelError(f"{folder}: tensor {name} is missing{hint}; shape needed: {list(shapes[ours])}")
    for name in sorted(stored.keys() - set(published.values())):
        raise ModelError(f"{stored[name].path}: tensor {_shown(name)} is no part of a {spec.family} model")
    for ours, name in published.items():
        if stored[name].shape != shapes[ours]:
            raise ModelError(
                f"{stored[name].path}: tensor {name} has shape {list(stored[name].shape)}; "
                f"the config asks for {list(shapes[ours])}"
            )


def _converted(
    name: str, tensor: Tensor, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if name.endswith("norm"):
        # Gemma's files store gain - 1; added in fp32, since near 1 bf16 has too few digits for it.
        return tensor.to(device, torch.float32, copy=True) + (1 if spec.family == "gemma3" else 0)
    # A copy even if nothing is converted: a view of the file would change, or fault, with the file.
    return tensor.to(device, dtype, copy=True)


def with_own_head(folder: Path, spec: ModelSpec) -> ModelSpec:
    """`spec`, but not tied if the folder's files hold an LM head that differs from the embedding.

    The files decide, not the flag in config.json: nobody stores a head of its own that is to be ignored.
    Raises ModelError for files that are missing or damaged.
    """
    if not spec.tie_embeddings:
        return spec
    stored = _survey(folder)
    body, head = _place(stored)
    embedding = f"{body}embed_tokens.weight"
    if head not in stored or embedding not in stored or _equal(stored, head, embedding):
        return spec
    message = "%s: %s differs from %s, so it is used, though config.json ties them"
    _log.warning(message, stored[head].path, head, embedding)
    return replace(spec, tie_embeddings=False)


def _equal(stored: dict[str, _Stored], one: str, other: str) -> bool:
    """Whether two tensors hold the same numbers."""
    first, second = stored[one], stored[other]
    if first.shape != second.shape or {first.dtype, second.dtype} - set(_DTYPES):
        return False
    with _opened(first.path) as file, _opened(second.path) as other_file:
        parts = file.get_slice(one), other_file.get_slice(other)
        # A few rows at a time, since they are the biggest tensors of all.
        starts = range(0, first.shape[0], ROWS_COMPARED)
        pieces = ([part[i : i + ROWS_COMPARED].float() for part in parts] for i in starts)
        return all(torch.equal(*pair) for pair in pieces)


def _shown(name: str) -> str:
    """A name from a file as a short part of one line."""
    return name if name.isprintable() and len(name) <= 120 else repr(name[:100])
