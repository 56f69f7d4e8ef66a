"""The tensors that hold keys and values, and how many blocks of them fit. Does not know who owns a block."""

import os
from pathlib import Path

import torch

from legato.attention.base import LayerCache
from legato.errors import ConfigError
from legato.models.spec import ModelSpec

# cgroup v2, then v1: mount, controller, limit, use, the reclaimable part's name in memory.stat
_MEMORY_FILES = (
    ("sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


class KVCache:
    """Paged keys and values of every layer: `num_blocks` blocks of `block_size` positions.

    All of it is filled with zeros here, so the memory is really taken: what does not fit fails at start-up
    and not under load. Zeros also matter to attention that reads a block's unused end: it masks with a
    weight of 0, and 0 times a stray NaN would be NaN.
    """

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ConfigError when the device cannot give the memory."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        try:
            self.layers = tuple(
                LayerCache(
                    keys=torch.zeros(shape, dtype=dtype, device=device),
                    values=torch.zeros(shape, dtype=dtype, device=device),
                )
                for _ in range(spec.num_layers)
            )
        except (RuntimeError, MemoryError) as error:
            size = num_blocks * block_bytes(spec, block_size=block_size, dtype=dtype)
            raise ConfigError(
                f"KV cache: {device} cannot give {size} bytes for {num_blocks} blocks"
            ) from error


def block_bytes(spec: ModelSpec, *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block's keys and values over all layers."""
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def size_blocks(spec: ModelSpec, *, block_size: int, dtype: torch.dtype, memory_bytes: int) -> int:
    """How many blocks fit in `memory_bytes`. Raises ConfigError when not even one does."""
    size = block_bytes(spec, block_size=block_size, dtype=dtype)
    if memory_bytes < size:
        raise ConfigError(
            f"KV cache: {memory_bytes} bytes of memory given, one block of {block_size} tokens needs {size}"
        )
    return memory_bytes // size


def free_memory(device: torch.device, *, root: Path = Path("/")) -> int:
    """Bytes that can be taken on `device` now.

    CUDA: what the driver says. CPU: the kernel's MemAvailable, or less where a cgroup's limit is nearer; on
    systems without /proc all of the physical memory. `root` is where the file system starts (for tests).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _table(root / "proc/meminfo").get("MemAvailable")
    if available is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([available * 1024, *_cgroup_headrooms(root)]))


def _cgroup_headrooms(root: Path) -> list[int]:
    """Limit less use, in bytes, of this process's cgroups and each of their parents that has a limit.

    Page cache that the kernel can drop at once (inactive_file) does not count as used.
    """
    headrooms = []
    for mount, controller, limit_name, used_name, reclaimable_name in _MEMORY_FILES:
        own = root / mount / _cgroup_path(root, controller)
        for group in (own, *own.parents):
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None:
                reclaimable = _table(group / "memory.stat").get(reclaimable_name, 0)
                headrooms.append(limit - used + reclaimable)
    return headrooms


def _cgroup_path(root: Path, controller: str) -> str:
    """This process's path under a cgroup mount, without the leading slash; the v2 controller's name is ""."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.strip("/")
    return ""


def _number(path: Path) -> int | None:
    """The integer in a file; None without the file or for "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """A file of lines `name value` or `name: value unit`."""
    words = [line.split() for line in _lines(path)]
    return {line[0].rstrip(":"): int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _lines(path: Path) -> list[str]:
    """A small text file's lines; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
