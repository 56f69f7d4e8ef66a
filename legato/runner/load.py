"""From an opened model to a runner: chooses device, element type, back ends and cache size, and says why."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from legato.attention.base import AttentionBackend
from legato.attention.reference import ReferenceAttention
from legato.errors import ConfigError
from legato.models.decoder import Decoder
from legato.models.linear import DenseLinear, LinearFactory
from legato.models.linear_cpu import Fp16Linear, Int8Linear, obstacle
from legato.models.load import OpenedModel
from legato.models.spec import ModelSpec
from legato.runner.device import choose_dtype, describe_device
from legato.runner.kv_cache import KVCache, block_bytes, free_memory, size_blocks
from legato.runner.runner import TorchRunner, choose_device

logger = logging.getLogger(__name__)

LINEARS: dict[str, LinearFactory] = {"dense": DenseLinear, "fp16": Fp16Linear, "w8": Int8Linear}

KV_SHARE = {"cpu": 0.25, "cuda": 0.9}
"""Share of free memory that the KV cache takes by default. A CPU's memory has other users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """What the settings say of the runner."""

    device: str
    dtype: str
    weights: str
    attention: str
    kv_dtype: str
    block_size: int
    num_blocks: int | None
    kv_memory: int | None
    """Bytes; ignored if `num_blocks` is given."""
    useful_tokens: int
    """The KV cache never holds more: no load could use it."""


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner, and what was chosen for it in words: device, dtype, attention, linear, kv cache."""

    runner: TorchRunner
    choices: dict[str, str]


def load_runner(
    opened: OpenedModel, options: RunnerOptions, *, progress: Callable[[str], None]
) -> LoadedRunner:
    """Load the weights and take the memory. Raises `ModelError` or `ConfigError`."""
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    dtype_name = str(dtype).removeprefix("torch.")
    spec = opened.spec
    progress(f"loading {spec.num_layers} layers as {dtype_name} on {device}")
    attention, attention_reason = choose_attention(options.attention, spec, device, progress)
    weights, why = choose_weights(options.weights, device, dtype)
    decoder = Decoder(
        spec,
        opened.weights(dtype=dtype, device=device),
        attention=attention,
        linear=LINEARS[weights],
        embedding_dtype=None if weights == "dense" else torch.float16,
    )
    kv_dtype = dtype if options.kv_dtype == "auto" else choose_dtype(options.kv_dtype, device)
    num_blocks, reason = _num_blocks(options, spec, kv_dtype, device)
    size = num_blocks * block_bytes(spec, block_size=options.block_size, dtype=kv_dtype)
    cache_in_words = (
        f"{num_blocks} blocks of {options.block_size} tokens, {size / 2**30:.2f} GiB of "
        f"{str(kv_dtype).removeprefix('torch.')}"
    )
    progress(f"taking {cache_in_words} for the KV cache")
    cache = KVCache(spec, num_blocks=num_blocks, block_size=options.block_size, dtype=kv_dtype, device=device)
    choices = {
        "device": f"{describe_device(device)} ({options.device})",
        "dtype": f"{dtype_name} ({options.dtype})",
        "attention": f"{attention.name} ({attention_reason})",
        "weights": f"{weights} ({why})",
        "kv cache": f"{cache_in_words} ({reason})",
    }
    return LoadedRunner(TorchRunner(decoder, cache), choices)


def choose_attention(
    asked: str, spec: ModelSpec, device: torch.device, progress: Callable[[str], None]
) -> tuple[AttentionBackend, str]:
    """The attention back end, and why. Raises `ConfigError` if what is asked for cannot work here."""
    if asked == "reference":
        return ReferenceAttention(), "asked for"
    try:
        if device.type != "cpu":
            raise ConfigError(f"attention: the cpu kernels do not run on {device.type}", param="attention")
        # Imported here: numba takes half a second, and other devices do not need it.
        from legato.attention.cpu import CpuAttention

        return CpuAttention(head_dim=spec.head_dim, progress=progress), asked
    except ConfigError as error:
        if asked == "cpu":
            raise
        return ReferenceAttention(), error.message


def choose_weights(asked: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The kind of linear layers, and why. Raises `ConfigError` if what is asked for cannot work here.

    The packed kinds compute in fp32 on a CPU. Without their kernels (Arm, a torch without FBGEMM) auto falls
    back to dense, and says so.
    """
    if asked == "dense":
        return asked, "asked for"
    problem = None
    if device.type != "cpu" or dtype != torch.float32:
        problem = f"it needs float32 on a cpu, this is {str(dtype).removeprefix('torch.')} on {device.type}"
    kind = "fp16" if asked == "auto" else asked
    problem = problem or obstacle(LINEARS[kind])
    if problem is None:
        return kind, asked if asked == "auto" else "asked for"
    if asked == "auto":
        if device.type == "cpu":
            logger.warning("weights: fp16 does not work here (%s); dense is several times slower", problem)
        return "dense", f"no fp16: {problem}"
    raise ConfigError(f"weights: {asked} does not work here: {problem}", param="weights")


def _num_blocks(
    options: RunnerOptions, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> tuple[int, str]:
    """How many blocks, and why: as told, or what fits in memory, but no more than could ever be used."""
    free, share = free_memory(device), KV_SHARE[device.type]
    memory, reason = options.kv_memory, "kv_memory is set"
    if options.num_blocks is not None:
        size = block_bytes(spec, block_size=options.block_size, dtype=dtype)
        memory, reason = options.num_blocks * size, "num_blocks is set"
    if memory is None:
        memory, reason = int(share * free), f"{share} of {free / 2**30:.1f} GiB free memory"
    if memory > free:  # found out later, it would cost the machine and not only this process
        raise ConfigError(
            f"KV cache: {reason} to {memory / 2**30:.1f} GiB; {device} has {free / 2**30:.1f} GiB free",
            param="kv_memory" if options.num_blocks is None else "num_blocks",
        )
    fits = size_blocks(spec, block_size=options.block_size, dtype=dtype, memory_bytes=memory)
    if options.num_blocks is not None:
        return fits, reason
    useful = -(-options.useful_tokens // options.block_size)
    return (fits, reason) if fits <= useful else (useful, "max_running x max_model_len tokens")
