"""The tensors of the KV cache, and how much memory they and everything else get."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from runner_steps import CPU, GEMMA, LLAMA

from legato.errors import ConfigError
from legato.machine import Memory
from legato.models.spec import ModelSpec
from legato.runner.backends import WEIGHTS, layer_ops, weights_bytes
from legato.runner.kv_cache import KVCache, block_bytes
from legato.runner.memory_plan import CacheSize, MemoryPlan, StepSize, plan_memory, step_bytes

GIB, MIB = 1 << 30, 1 << 20
STEP = StepSize(tokens=64, rows=4)
CACHE = CacheSize(
    block_size=16,
    num_blocks=None,
    kv_memory=None,
    useful_tokens=100_000,
    useful_why="100,000 tokens are useful",
    max_model_len=4000,
)
ONE = block_bytes(LLAMA, block_size=16, dtype=torch.float32)
REST = step_bytes(LLAMA, STEP) + 256 * MIB


def plan(available: int, weights: int = 10 * MIB, loading: int = 0, **cache: Any) -> MemoryPlan:
    return plan_memory(
        LLAMA,
        replace(CACHE, **cache),
        STEP,
        Memory(available, "available"),
        device=CPU,
        weights=weights,
        loading=loading,
        kv_dtype=torch.float32,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_a_pool_takes_what_is_computed(spec: ModelSpec, dtype: torch.dtype) -> None:
    cache = KVCache(spec, num_blocks=9, block_size=16, dtype=dtype, device=CPU)
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert taken == 9 * block_bytes(spec, block_size=16, dtype=dtype)
    assert len(cache.layers) == spec.num_layers
    assert cache.layers[0].keys.shape == (9, 16, spec.num_kv_heads, spec.head_dim)
    assert not any(layer.keys.any() or layer.values.any() for layer in cache.layers)


def test_a_pool_that_the_machine_cannot_give_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="cpu cannot give"):
        KVCache(LLAMA, num_blocks=1 << 42, block_size=16, dtype=torch.float32, device=CPU)


def test_the_default_cache_is_what_is_useful() -> None:
    """100,000 tokens are 6,250 blocks of 16."""
    chosen = plan(64 * GIB)
    assert (chosen.num_blocks, chosen.why) == (6250, "100,000 tokens are useful")
    assert chosen.kv_cache == 6250 * ONE


def test_the_default_cache_leaves_three_quarters_of_the_memory_to_others() -> None:
    left = 4000 * ONE
    chosen = plan(10 * MIB + REST + left)
    assert chosen.num_blocks == 1000
    assert chosen.why.startswith("0.25 of the 0.")
    assert chosen.total == 10 * MIB + REST + 1000 * ONE


def test_a_small_machine_gets_a_small_cache() -> None:
    """1,024 tokens are 64 blocks; a quarter of what is left would be 16. Prompts of 40 tokens need 3."""
    available = 10 * MIB + REST + 64 * ONE
    assert (plan(available).num_blocks, plan(available).why) == (64, "the least that is useful")
    assert plan(10 * MIB + REST + 4 * ONE, max_model_len=40, useful_tokens=100).num_blocks == 3


def test_a_machine_that_is_too_small_is_told_of_in_numbers() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^memory: this model needs 3\.00 GiB for weights, 0\.0\d GiB for the KV cache \(the least "
        r"that is useful\) and about 0\.25 GiB besides, 3\.\d\d GiB at most; there are 3\.0 GiB available$",
    ):
        plan(3 * GIB, weights=3 * GIB)


def test_loading_counts_where_it_takes_more_than_serving() -> None:
    with pytest.raises(
        ConfigError, match=r"1\.00 GiB for weights \(5\.00 GiB while they are read\), .* 5\.00 GiB at"
    ):
        plan(4 * GIB, weights=GIB, loading=5 * GIB)
    assert plan(6 * GIB, weights=GIB, loading=5 * GIB).total == 5 * GIB


@pytest.mark.parametrize(
    ("told", "num_blocks"), [({"num_blocks": 9}, 9), ({"kv_memory": 20 * ONE + 1}, 20)], ids=str
)
def test_a_cache_that_was_asked_for_is_taken(told: dict[str, int], num_blocks: int) -> None:
    chosen = plan(GIB, **told)
    assert (chosen.num_blocks, chosen.why) == (num_blocks, f"{next(iter(told))} is set")


@pytest.mark.parametrize("told", [{"num_blocks": GIB // ONE}, {"kv_memory": GIB}], ids=str)
def test_a_cache_that_does_not_fit_beside_the_weights_is_refused(told: dict[str, int]) -> None:
    (name,) = told
    with pytest.raises(ConfigError, match=rf"1\.00 GiB for the KV cache \({name} is set\)") as caught:
        plan(GIB, **told)
    assert caught.value.param == name


def test_memory_for_less_than_one_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=rf"is {ONE - 1} bytes; one block of 16 tokens needs {ONE}"):
        plan(GIB, kv_memory=ONE - 1)


def test_the_plan_in_one_line() -> None:
    line = str(plan(20 * GIB, weights=3 * GIB, num_blocks=GIB // ONE))
    assert line == "weights 3.00, KV cache 1.00, rest about 0.25: 4.25 GiB of 20.0 GiB available"


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_take_what_the_plan_says(kind: str, tied: bool) -> None:
    """Counted where the layers keep them; FBGEMM's packed matrices do not tell their size, and are padded."""
    spec = replace(LLAMA, head_dim=32, intermediate_size=64, hidden_size=64, tie_embeddings=tied)
    ops = layer_ops(kind)
    shapes = {name: shape for name, shape in spec.tensor_shapes().items() if len(shape) == 2}
    layers = [
        ops.projection(torch.ones(shape)) for name, shape in shapes.items() if name.startswith("layers")
    ]
    if kind in ("w16", "w8"):
        matrices = [*layers, ops.projection(torch.ones(spec.vocab_size, 64))]
        held = sum(matrix._packed.nbytes for matrix in matrices)
        held += 0 if tied else 2 * spec.vocab_size * 64
        assert weights_bytes(kind, spec, torch.float32) == held
    else:
        numbers = sum(rows * columns for rows, columns in shapes.values())
        copies = spec.vocab_size * 64 if tied and kind == "fp16" else 0
        size = 2 if kind == "fp16" else 4
        assert weights_bytes(kind, spec, torch.float32) == size * (numbers + copies)
