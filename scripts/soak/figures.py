"""What a server's process and its metrics page say while it runs, and how much of it grows. Linux only."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wire import ask

MIB = 2**20
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "legato_blocks_used")
"""Gauges that are 0 on an idle server."""


def process_tree(root: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # ended in the meantime
            continue
        children.setdefault(parent, []).append(int(process.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def resident_mib(root: int) -> float:
    """Memory that the tree holds in RAM."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in process_tree(root))
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def num_files(root: int) -> int:
    """Open file descriptors of the tree."""
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in process_tree(root))


async def metrics(port: int) -> dict[str, float]:
    """The samples of the metrics page, summed over labels."""
    page = (await ask(port, "/metrics")).body.decode().splitlines()
    sums: dict[str, float] = {}
    for name, value in (sample.rsplit(" ", 1) for sample in page if not sample.startswith("#")):
        sums[name.partition("{")[0]] = sums.get(name.partition("{")[0], 0.0) + float(value)
    return sums


@dataclass(slots=True)
class Watch:
    """Looks at a server every second or so. `faults` are health checks that failed."""

    port: int
    pid: int
    memory: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, MiB)"""
    most: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    async def run(self, interval: float = 1.0) -> None:
        began = time.monotonic()
        while True:
            self.memory.append((time.monotonic() - began, resident_mib(self.pid)))
            now = {name: value for name, value in (await metrics(self.port)).items() if name in BUSY}
            now["files"] = num_files(self.pid)
            self.most = {name: max(value, self.most.get(name, 0)) for name, value in now.items()}
            health = await ask(self.port, "/health")
            if health.status != 200:
                self.faults.append(f"/health: {health.status} {health.body[:200]!r}")
            await asyncio.sleep(interval)


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """How much the straight line through the last two thirds of (seconds, MiB) rises in them."""
    settled = samples[len(samples) // 3 :]
    times = [at for at, _ in settled]
    if len(times) < 2:
        return 0.0
    mean_time, mean = sum(times) / len(times), sum(mib for _, mib in settled) / len(times)
    slope = sum((at - mean_time) * (mib - mean) for at, mib in settled) / sum(
        (at - mean_time) ** 2 for at in times
    )
    return slope * (times[-1] - times[0])
