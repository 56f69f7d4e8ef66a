"""How many blocks fit, and how much memory a machine says it has."""

from pathlib import Path

import pytest
import torch
from runner_steps import CPU, GEMMA, LLAMA

from legato.errors import ConfigError
from legato.models.spec import ModelSpec
from legato.runner.kv_cache import KVCache, block_bytes, free_memory, size_blocks
from legato.runner.load import RunnerOptions, _num_blocks

GIB = 1 << 30
FULL = 9223372036854771712  # what cgroup v1 shows for "no limit"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_a_pool_of_the_computed_size_takes_what_was_given_and_not_more(
    spec: ModelSpec, dtype: torch.dtype
) -> None:
    given = 1_000_000
    num_blocks = size_blocks(spec, block_size=16, dtype=dtype, memory_bytes=given)
    cache = KVCache(spec, num_blocks=num_blocks, block_size=16, dtype=dtype, device=CPU)
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert given - taken in range(block_bytes(spec, block_size=16, dtype=dtype))
    assert len(cache.layers) == spec.num_layers
    assert cache.layers[0].keys.shape == (num_blocks, 16, spec.num_kv_heads, spec.head_dim)
    assert not any(layer.keys.any() or layer.values.any() for layer in cache.layers)


def test_memory_for_less_than_one_block_is_refused_with_the_numbers() -> None:
    one = block_bytes(LLAMA, block_size=16, dtype=torch.float32)
    assert size_blocks(LLAMA, block_size=16, dtype=torch.float32, memory_bytes=one) == 1
    with pytest.raises(ConfigError, match=rf"{one - 1} bytes .* block of 16 tokens needs {one}"):
        size_blocks(LLAMA, block_size=16, dtype=torch.float32, memory_bytes=one - 1)


def test_a_pool_that_the_machine_cannot_give_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="cpu cannot give"):
        KVCache(LLAMA, num_blocks=1 << 42, block_size=16, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("told", "num_blocks", "why"),
    [
        ({}, 7, "100 tokens are useful"),
        ({"num_blocks": 9}, 9, "num_blocks is set"),
        ({"kv_memory": 20}, 20, "kv_memory is set"),
    ],
)
def test_the_cache_takes_no_more_than_is_useful_unless_it_is_told_to(
    told: dict[str, int], num_blocks: int, why: str
) -> None:
    """100 tokens are 7 blocks of 16."""
    one = block_bytes(LLAMA, block_size=16, dtype=torch.float32)
    memory = {"num_blocks": None, "kv_memory": None} | told
    if memory["kv_memory"] is not None:
        memory["kv_memory"] *= one
    options = RunnerOptions(
        device="cpu",
        threads=None,
        dtype="float32",
        weights="dense",
        attention="reference",
        kv_dtype="auto",
        block_size=16,
        useful_tokens=100,
        useful_why="100 tokens are useful",
        **memory,
    )
    assert _num_blocks(options, LLAMA, torch.float32, CPU) == (num_blocks, why)


def machine(root: Path, files: dict[str, str]) -> Path:
    """A file system with /proc/meminfo saying 8 GiB available, and `files`."""
    for name, text in {"proc/meminfo": "MemTotal: 1 kB\nMemAvailable:  8388608 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 8 * GIB, id="no cgroup"),
        pytest.param(
            {"sys/fs/cgroup/memory.max": f"{5 * GIB}\n", "sys/fs/cgroup/memory.current": f"{2 * GIB}\n"},
            3 * GIB,
            id="v2 limit",
        ),
        pytest.param(
            {
                "sys/fs/cgroup/memory.max": str(5 * GIB),
                "sys/fs/cgroup/memory.current": str(2 * GIB),
                "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {GIB}\n",
            },
            4 * GIB,
            id="v2 page cache is not use",
        ),
        pytest.param(
            {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": str(2 * GIB)},
            8 * GIB,
            id="v2 without limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/outer/inner\n",
                "sys/fs/cgroup/outer/memory.max": str(3 * GIB),
                "sys/fs/cgroup/outer/memory.current": str(GIB),
                "sys/fs/cgroup/outer/inner/memory.max": str(6 * GIB),
                "sys/fs/cgroup/outer/inner/memory.current": str(GIB),
            },
            2 * GIB,
            id="v2 the nearest limit is the parent's",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/job\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(FULL),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(7 * GIB),
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(4 * GIB),
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(3 * GIB),
                "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {GIB}\n",
            },
            2 * GIB,
            id="v1 limit",
        ),
        pytest.param(
            {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": str(2 * GIB)},
            0,
            id="over the limit",
        ),
    ],
)
def test_free_memory_is_the_nearest_of_machine_and_cgroup(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert free_memory(CPU, root=machine(tmp_path, files)) == expected


def test_without_proc_all_physical_memory_counts(tmp_path: Path) -> None:
    assert free_memory(CPU, root=tmp_path) >= free_memory(CPU) > 0
