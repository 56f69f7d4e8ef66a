"""From an opened model to a runner: chooses device, element type, back ends and cache size, and says why."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from legato.errors import ConfigError
from legato.models.decoder import Decoder
from legato.models.load import OpenedModel
from legato.models.spec import ModelSpec
from legato.runner.backends import (
    choose_activations,
    choose_attention,
    choose_kv_dtype,
    choose_weights,
    layer_ops,
    start_threads,
)
from legato.runner.device import describe_device
from legato.runner.kv_cache import KVCache, block_bytes, free_memory, size_blocks
from legato.runner.runner import TorchRunner, choose_device

KV_SHARE = {"cpu": 0.25, "cuda": 0.9}
"""Share of free memory that the KV cache takes by default. A CPU's memory has other users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """What the settings say of the runner."""

    device: str
    threads: int | None
    """On a CPU; torch's number if None."""
    dtype: str
    weights: str
    attention: str
    kv_dtype: str
    block_size: int
    num_blocks: int | None
    kv_memory: int | None
    """Bytes; ignored if `num_blocks` is given."""
    useful_tokens: int
    """The KV cache never holds more, unless it is told to: a small model leaves memory to others."""
    useful_why: str
    """Where that number comes from, in words."""


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
    if options.threads is not None and device.type == "cpu":
        torch.set_num_threads(options.threads)
    spec = opened.spec
    dtype = choose_activations(options.dtype, spec, device)
    dtype_name = str(dtype).removeprefix("torch.")
    progress(f"loading {spec.num_layers} layers as {dtype_name} on {device}")
    weights, why = choose_weights(options.weights, spec, device, dtype)
    is_compiled = options.attention != "reference" or weights in ("w16", "w8")
    threads = start_threads(device, progress) if is_compiled else None
    attention, attention_reason = choose_attention(options.attention, spec, device, threads, progress)
    decoder = Decoder(
        spec,
        opened.weights(dtype=dtype, device=device),
        attention=attention,
        ops=layer_ops(weights, threads, progress),
    )
    kv_dtype, kv_reason = choose_kv_dtype(options.kv_dtype, attention, dtype, device)
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
        "kv cache": f"{cache_in_words} ({kv_reason}; {reason})",
    }
    return LoadedRunner(TorchRunner(decoder, cache), choices)


def _num_blocks(
    options: RunnerOptions, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> tuple[int, str]:
    """How many blocks, and why: as told, or what fits into a share of the memory and is useful."""
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
    if options.num_blocks is not None or options.kv_memory is not None:
        return fits, reason
    useful = -(-options.useful_tokens // options.block_size)
    return (fits, reason) if fits <= useful else (useful, options.useful_why)
