"""What the operating system lets this process use of the machine: processors and memory.

A container's limits are those of its control groups (cgroup v1 and v2), which the usual calls do not show.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

_V2 = "sys/fs/cgroup"
_CPU_V1 = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct")
# cgroup v2, then v1: mount, controller, limit, use, the reclaimable part's name in memory.stat
_MEMORY_FILES = (
    (_V2, "", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


@dataclass(frozen=True, slots=True)
class Processors:
    """How many processors this process may keep busy, and what limits them."""

    count: int
    """At least 1. A quota is rounded down: a thread too many makes all of them wait for the next period."""
    installed: int
    limit: str | None
    """The limit below `installed`, in words; None if there is none."""

    def __str__(self) -> str:
        return f"{self.count} of {self.installed}" + (f" ({self.limit})" if self.limit else "")


def processors(*, root: Path = ROOT) -> Processors:
    """By the process's affinity and by the CPU quota of its control groups. `root` is for tests."""
    installed = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else installed
    quota = min(_cpu_quotas(root), default=math.inf)
    if quota < allowed:
        return Processors(max(int(quota), 1), installed, f"the control group's quota is {quota:.3g} CPUs")
    limit = f"this process may run on {allowed}" if allowed < installed else None
    return Processors(allowed, installed, limit)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that this process can still take, and what limits them."""

    available: int
    limit: str
    """What the number is, in words."""

    def __str__(self) -> str:
        return f"{self.available / 2**30:.1f} GiB {self.limit}"


def memory(*, root: Path = ROOT) -> Memory:
    """The kernel's MemAvailable, or less where a control group's limit is nearer. `root` is for tests.

    On systems without /proc it is all of the physical memory.
    """
    available = _table(root / "proc/meminfo").get("MemAvailable")
    if available is None:
        return Memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "of physical memory")
    available *= 1024
    headroom = min(_memory_headrooms(root), default=math.inf)
    if headroom < available:
        return Memory(max(int(headroom), 0), "left below the control group's limit")
    return Memory(available, "available")


def _memory_headrooms(root: Path) -> list[int]:
    """Limit less use, in bytes, of this process's control groups and each of their parents with a limit.

    Page cache that the kernel can drop at once (inactive_file) does not count as used.
    """
    headrooms = []
    for mount, controller, limit_name, used_name, reclaimable_name in _MEMORY_FILES:
        for group in _groups(root, mount, controller):
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None:
                reclaimable = _table(group / "memory.stat").get(reclaimable_name, 0)
                headrooms.append(limit - used + reclaimable)
    return headrooms


def _cpu_quotas(root: Path) -> list[float]:
    """CPUs' worth of time that each control group of this process may use; only those with a limit."""
    quotas = []
    for group in _groups(root, _V2, ""):
        words = "".join(_lines(group / "cpu.max")).split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    for mount in _CPU_V1:
        for group in _groups(root, mount, "cpu"):
            quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
            if quota and period:  # a quota of -1 means none, and is not a number here
                quotas.append(quota / period)
    return quotas


def _groups(root: Path, mount: str, controller: str) -> list[Path]:
    """This process's control group under a mount, and its parents up to the mount."""
    top = root / mount
    own = top / _cgroup_path(root, controller)
    return [own, *(parent for parent in own.parents if parent.is_relative_to(top))]


def _cgroup_path(root: Path, controller: str) -> str:
    """This process's path under a cgroup mount, without the leading slash; the v2 controller's name is ""."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.strip("/")
    return ""


def _number(path: Path) -> int | None:
    """The integer in a file; None without the file, for "max" and for negative numbers."""
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
