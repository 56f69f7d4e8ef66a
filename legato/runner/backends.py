"""Which attention and which layers compute a model here, and why, in words."""

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from legato.attention.base import AttentionBackend
from legato.attention.reference import ReferenceAttention
from legato.errors import ConfigError
from legato.models import linear_fp16
from legato.models.projection import LayerOps, TorchOps
from legato.models.spec import ModelSpec
from legato.runner.device import choose_dtype

if TYPE_CHECKING:
    from legato.kernels.thread_pool import ThreadPool

# The kernels are imported where they are used: numba takes half a second, and other devices do not need it.

logger = logging.getLogger(__name__)

WEIGHTS = ("dense", "fp16", "w16", "w8")
"""Ways to keep weights: as they are; packed in 16-bit floats; as integers of 12 or 8 bits."""

Progress = Callable[[str], None]


def start_threads(device: torch.device, progress: Progress) -> "ThreadPool | None":
    """The threads of compiled kernels, as many as torch has; none for devices that do not run any."""
    if device.type != "cpu":
        return None
    from legato.kernels.thread_pool import ThreadPool

    return ThreadPool(torch.get_num_threads(), progress=progress)


def choose_activations(asked: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The element type of activations. Raises `ConfigError` if what is asked for cannot work here."""
    dtype = choose_dtype(asked, device)
    if dtype == torch.float16 and spec.family == "gemma3":
        raise ConfigError(
            "dtype: float16 does not work for Gemma 3, whose activations pass its limit of 65504 and would "
            "become infinite; auto, bfloat16 and float32 do",
            param="dtype",
        )
    return dtype


def choose_attention(
    asked: str, spec: ModelSpec, device: torch.device, threads: "ThreadPool | None", progress: Progress
) -> tuple[AttentionBackend, str]:
    """The attention back end, and why. Raises `ConfigError` if what is asked for cannot work here."""
    if asked == "reference":
        return ReferenceAttention(), "asked for"
    try:
        if device.type != "cpu":
            raise ConfigError(f"attention: the cpu kernels do not run on {device.type}", param="attention")
        from legato.attention.cpu import CpuAttention

        return CpuAttention(threads, head_dim=spec.head_dim, progress=progress), asked
    except ConfigError as error:
        if asked == "cpu":
            raise
        return ReferenceAttention(), error.message


def choose_weights(asked: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """How weights are kept, and why. Raises `ConfigError` if what is asked for cannot work here.

    Automatic is w16, else fp16, else dense, which is the only one on a GPU and is not exact on a CPU.
    """
    if asked != "auto":
        problem = _obstacle(asked, spec, device, dtype)
        if problem is None:
            return asked, "asked for"
        raise ConfigError(f"weights: {asked} does not work here: {problem}", param="weights")
    without: dict[str, list[str]] = {}  # what is in the way -> of which kinds
    for kind in ("w16", "fp16"):
        problem = _obstacle(kind, spec, device, dtype)
        if problem is None and kind == "w16":
            problem = _slowness()
        if problem is None:
            return kind, "; ".join(["auto", *_in_words(without)])
        without.setdefault(problem, []).append(kind)
    why = "; ".join(_in_words(without))
    if device.type == "cpu":
        logger.warning("weights: %s; dense is several times slower, and not bit-exact between schedules", why)
    return "dense", why


def choose_kv_dtype(
    asked: str, attention: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> tuple[torch.dtype, str]:
    """What K and V are stored as, and why.

    Automatic is 16 bits where the kernels read them as fast as they come: half the memory, faster decodes at
    long contexts, and no difference that can be measured (docs/decisions/0009).
    """
    if asked != "auto":
        return choose_dtype(asked, device), "asked for"
    return (torch.float16 if attention.name == "cpu" and dtype == torch.float32 else dtype), "auto"


def layer_ops(
    weights: str, threads: "ThreadPool | None" = None, progress: Progress = lambda _: None
) -> LayerOps:
    """Layers that keep weights in one of `WEIGHTS`."""
    if weights == "dense":
        return TorchOps()
    if weights == "fp16":
        return TorchOps(linear_fp16.Fp16Linear, embedding_dtype=torch.float16)
    from legato.models.projection_cpu import CpuOps

    return CpuOps(weights, threads, progress=progress)


def weights_bytes(kind: str, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Memory of a model's weights, kept in one of `WEIGHTS`. Norms and biases are too small to count."""
    matrices = {name: shape for name, shape in spec.tensor_shapes().items() if len(shape) == 2}
    if kind in ("w16", "w8"):
        from legato.models.projection_cpu import packed_weight_bytes

        # An embedding that is no LM head as well is only looked up in, and kept in 16 bits.
        embedding = 0 if spec.tie_embeddings else 2 * math.prod(matrices.pop("embed"))
        return embedding + sum(packed_weight_bytes(kind, shape) for shape in matrices.values())
    numbers = sum(math.prod(shape) for shape in matrices.values())
    if kind == "fp16":
        return 2 * (numbers + (math.prod(matrices["embed"]) if spec.tie_embeddings else 0))
    return dtype.itemsize * numbers


def _in_words(without: dict[str, list[str]]) -> list[str]:
    return [f"no {' or '.join(kinds)}: {problem}" for problem, kinds in without.items()]


def _obstacle(kind: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    if kind == "dense":
        return None
    if device.type != "cpu" or dtype != torch.float32:
        return f"it needs float32 on a cpu, this is {str(dtype).removeprefix('torch.')} on {device.type}"
    if kind == "fp16":
        return linear_fp16.obstacle()
    from legato.models.projection_cpu import obstacle

    return obstacle(spec)


def _slowness() -> str | None:
    """Why integers would be slow here, in words."""
    from legato.models.projection_cpu import is_fast

    return None if is_fast() else "this processor has no instruction for sums of integer products"
