"""From an opened model to a runner: chooses device, element type, back ends and cache size, and says why."""

from collections.abc import Callable
from dataclasses import dataclass

from legato.models.decoder import Decoder
from legato.models.load import OpenedModel
from legato.runner.backends import (
    choose_activations,
    choose_attention,
    choose_kv_dtype,
    choose_weights,
    layer_ops,
    start_threads,
    weights_bytes,
)
from legato.runner.device import choose_device, describe_device, device_memory, set_threads
from legato.runner.kv_cache import KVCache
from legato.runner.memory_plan import CacheSize, StepSize, gib, loading_bytes, plan_memory, trim_heap
from legato.runner.runner import TorchRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """What the settings say of the runner."""

    device: str
    threads: int | None
    """On a CPU; None for a number that suits the machine."""
    dtype: str
    weights: str
    attention: str
    kv_dtype: str
    cache: CacheSize
    step: StepSize


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner, and what was chosen for it in words: device, dtype, attention, weights, kv cache, memory."""

    runner: TorchRunner
    choices: dict[str, str]


def load_runner(
    opened: OpenedModel, options: RunnerOptions, *, progress: Callable[[str], None]
) -> LoadedRunner:
    """Load the weights and take the memory. Raises `ModelError` or `ConfigError`."""
    device = choose_device(options.device)
    if device.type == "cpu":
        set_threads(options.threads)
    spec = opened.spec
    dtype = choose_activations(options.dtype, spec, device)
    dtype_name = str(dtype).removeprefix("torch.")
    kind, why = choose_weights(options.weights, spec, device, dtype)
    is_compiled = options.attention != "reference" or kind in ("w16", "w8")
    threads = start_threads(device, progress) if is_compiled else None
    attention, attention_reason = choose_attention(options.attention, spec, device, threads, progress)
    kv_dtype, kv_reason = choose_kv_dtype(options.kv_dtype, attention, dtype, device)
    kept = weights_bytes(kind, spec, dtype)
    plan = plan_memory(
        spec,
        options.cache,
        options.step,
        device_memory(device),
        device=device,
        weights=kept,
        loading=loading_bytes(spec, kept, dtype.itemsize),
        kv_dtype=kv_dtype,
    )
    ops = layer_ops(kind, threads, progress)
    progress(f"loading {spec.num_layers} layers as {dtype_name} on {device}; memory: {plan}")
    decoder = Decoder(spec, opened.weights(dtype=dtype, device=device), attention=attention, ops=ops)
    opened.note_good()
    trim_heap()
    num_blocks, block_size = plan.num_blocks, options.cache.block_size
    cache_in_words = (
        f"{num_blocks} blocks of {block_size} tokens, {gib(plan.kv_cache)} GiB of "
        f"{str(kv_dtype).removeprefix('torch.')}"
    )
    progress(f"taking {cache_in_words} for the KV cache")
    cache = KVCache(spec, num_blocks=num_blocks, block_size=block_size, dtype=kv_dtype, device=device)
    choices = {
        "device": describe_device(device, options.device),
        "dtype": f"{dtype_name} ({options.dtype})",
        "attention": f"{attention.name} ({attention_reason})",
        "weights": f"{kind} ({why})",
        "kv cache": f"{cache_in_words} ({kv_reason}; {plan.why})",
        "memory": str(plan),
    }
    return LoadedRunner(TorchRunner(decoder, cache), choices)
