"""Processors and memory: the nearest of the limits of machine, affinity and control groups."""

import os
from pathlib import Path

import pytest

from legato.machine import Processors, memory, processors

GIB = 1 << 30
FULL = 9223372036854771712  # what cgroup v1 shows for "no limit"


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
def test_memory_is_the_nearest_of_machine_and_cgroup(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert memory(root=machine(tmp_path, files)).available == expected


def test_the_limit_is_named(tmp_path: Path) -> None:
    assert str(memory(root=machine(tmp_path, {}))) == "8.0 GiB available"
    files = {"sys/fs/cgroup/memory.max": str(5 * GIB), "sys/fs/cgroup/memory.current": str(2 * GIB)}
    assert str(memory(root=machine(tmp_path, files))) == "3.0 GiB left below the control group's limit"


def test_without_proc_all_physical_memory_counts(tmp_path: Path) -> None:
    assert memory(root=tmp_path).available >= memory().available > 0


V1 = "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        pytest.param({}, None, id="no cgroup"),
        pytest.param({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None, id="v2 without quota"),
        pytest.param({"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0, id="v2"),
        pytest.param({"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5, id="v2, part of a CPU"),
        pytest.param({"sys/fs/cgroup/cpu.max": "25000 50000\n"}, 0.5, id="v2, less than one"),
        pytest.param({"sys/fs/cgroup/cpu.max": "1600000 100000\n"}, None, id="v2, more than there are"),
        pytest.param({"sys/fs/cgroup/cpu.max": "\0\0 nonsense"}, None, id="v2, nonsense"),
        pytest.param({"sys/fs/cgroup/cpu.max": "100000 0"}, None, id="v2, no period"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/outer/inner\n",
                "sys/fs/cgroup/outer/cpu.max": "200000 100000",
                "sys/fs/cgroup/outer/inner/cpu.max": "max 100000",
            },
            2.0,
            id="v2, the parent's",
        ),
        pytest.param(
            {f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "100000"}, None, id="v1 none"
        ),
        pytest.param({f"{V1}/cpu.cfs_quota_us": "400000", f"{V1}/cpu.cfs_period_us": "100000"}, 4.0, id="v1"),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "50000",
            },
            3.0,
            id="v1, one mount for both controllers",
        ),
    ],
)
def test_a_quota_is_rounded_down_to_threads(
    tmp_path: Path, files: dict[str, str], quota: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    found = processors(root=machine(tmp_path, files))
    if quota is None:
        assert found == Processors(8, 8, None)
    else:
        assert found == Processors(max(int(quota), 1), 8, f"the control group's quota is {quota:g} CPUs")


def test_affinity_counts_where_it_is_nearer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 6}, raising=False)
    assert str(processors(root=tmp_path)) == "3 of 8 (this process may run on 3)"
    files = {"sys/fs/cgroup/cpu.max": "200000 100000"}
    assert processors(root=machine(tmp_path, files)).count == 2
    files = {"sys/fs/cgroup/cpu.max": "500000 100000"}
    assert processors(root=machine(tmp_path, files)).count == 3
