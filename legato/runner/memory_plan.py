"""How the memory of a device is divided: weights, KV cache, and the rest. Decided before anything is read."""

import ctypes
from contextlib import suppress
from dataclasses import dataclass

import torch

from legato.errors import ConfigError
from legato.machine import Memory
from legato.models.spec import ModelSpec
from legato.runner.kv_cache import block_bytes

KV_SHARE = {"cpu": 0.25, "cuda": 0.9}
"""The default KV cache takes at most this share of what weights and rest leave. A CPU's memory has other
users."""
PROGRAM = 256 << 20
"""What a server comes to take besides, on a CPU: compiled code, buffers, the process for grammars."""
LEAST_TOKENS = 1024
"""A default KV cache that holds fewer is no use: the start is refused, unless prompts are shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """What the settings say of the KV cache's size."""

    block_size: int
    num_blocks: int | None
    kv_memory: int | None
    """Bytes; ignored if `num_blocks` is given."""
    useful_tokens: int
    """The default is never larger: a machine's memory has other users."""
    useful_why: str
    """Where that number comes from, in words."""
    max_model_len: int
    """Tokens of the longest prompt with its reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The largest step, which needs memory for its intermediate results."""

    tokens: int
    rows: int
    """Whose logits are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of each part. `str()` tells it in one line."""

    memory: Memory
    """Before the weights are read."""
    weights: int
    loading: int
    """The most that loading the weights takes at one moment, the weights included."""
    rest: int
    """Estimated: intermediate results of the largest step, and the program itself."""
    num_blocks: int
    kv_cache: int
    why: str
    """Why the KV cache has this size, in words."""

    @property
    def total(self) -> int:
        """The most that is taken at one moment."""
        return max(self.weights + self.kv_cache + self.rest, self.loading)

    def __str__(self) -> str:
        return (
            f"weights {gib(self.weights)}, KV cache {gib(self.kv_cache)}, rest about {gib(self.rest)}: "
            f"{gib(self.weights + self.kv_cache + self.rest)} GiB of {self.memory}"
        )


def gib(num_bytes: int) -> str:
    """A number of GiB without its unit."""
    return f"{num_bytes / 2**30:.2f}"


def plan_memory(
    spec: ModelSpec,
    cache: CacheSize,
    step: StepSize,
    memory: Memory,
    *,
    device: torch.device,
    weights: int,
    loading: int,
    kv_dtype: torch.dtype,
) -> MemoryPlan:
    """Divide `memory`. `weights` are the bytes that the weights take, `loading` those while they are read.

    Raises `ConfigError` with the numbers if they do not fit, with the KV cache that was asked for or with a
    small one.
    """
    rest = step_bytes(spec, step) + (PROGRAM if device.type == "cpu" else 0)
    one = block_bytes(spec, block_size=cache.block_size, dtype=kv_dtype)
    left = memory.available - weights - rest
    param = None
    if cache.num_blocks is not None:
        num_blocks, why, param = cache.num_blocks, "num_blocks is set", "num_blocks"
    elif cache.kv_memory is not None:
        num_blocks, why, param = cache.kv_memory // one, "kv_memory is set", "kv_memory"
        if not num_blocks:
            raise ConfigError(
                f"kv_memory is {cache.kv_memory} bytes; one block of {cache.block_size} tokens needs {one}",
                param=param,
            )
    else:
        num_blocks, why = _default_blocks(cache, KV_SHARE[device.type], left, one)
    plan = MemoryPlan(
        memory=memory,
        weights=weights,
        loading=loading,
        rest=rest,
        num_blocks=num_blocks,
        kv_cache=num_blocks * one,
        why=why,
    )
    if plan.total > memory.available:  # found out later, it would cost the machine and not only this process
        raise ConfigError(_too_small(plan), param=param)
    return plan


def _default_blocks(cache: CacheSize, share: float, left: int, one: int) -> tuple[int, str]:
    """As many as are useful and no more than a share of what is left; and why."""
    useful = -(-cache.useful_tokens // cache.block_size)
    least = -(-min(LEAST_TOKENS, cache.max_model_len) // cache.block_size)
    fits = int(share * left) // one
    if fits >= useful:
        return useful, cache.useful_why
    if fits < least:
        return least, "the least that is useful"
    return fits, f"{share:g} of the {gib(left)} GiB that weights and rest leave"


def _too_small(plan: MemoryPlan) -> str:
    needs = f"needs {gib(plan.weights)} GiB for weights"
    if plan.total == plan.loading:
        needs += f" ({gib(plan.loading)} GiB while they are read)"
    return (
        f"memory: this model {needs}, {gib(plan.kv_cache)} GiB for the KV cache ({plan.why}) and about "
        f"{gib(plan.rest)} GiB besides, {gib(plan.total)} GiB at most; there are {plan.memory}"
    )


def step_bytes(spec: ModelSpec, step: StepSize) -> int:
    """About the memory for the intermediate results of a step, in 4 bytes each."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    row = 3 * spec.hidden_size + 2 * heads + 2 * spec.intermediate_size
    return 4 * (step.tokens * row + 3 * step.rows * spec.vocab_size)


def loading_bytes(spec: ModelSpec, weights: int, element: int) -> int:
    """The most memory while the weights are read, `weights` included.

    The embedding is there as a whole, with the LM head beside it or in its final form. Later a layer's joined
    matrices are there twice, while the heap still holds what the embedding took (measured, see `trim_heap`).
    """
    embedding = spec.vocab_size * spec.hidden_size * element
    mlp = 2 * spec.intermediate_size * spec.hidden_size * element
    return max(2 * embedding, weights + max(embedding, 2 * mlp))


def trim_heap() -> None:
    """Give free memory of the C library's heap back to the system, where this library can.

    glibc keeps what loading took and freed: 0.65 GiB for a model of 1.5 billion weights.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
