"""How much processor time servers, this client and everybody else take, from Linux's /proc.

A comparison on one machine is worth something only if idle servers are idle and nobody else computes: this
says so for every sample. Knows no HTTP.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"
FLAGS = "avx2 f16c avx512f avx512_vnni avx512_bf16 avx_vnni amx_int8 amx_bf16"
"""Processor flags that decide which kernels a server can use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Processor seconds used until now."""

    at: float
    busy: float
    """By the whole machine, time taken by its host included."""
    client: float
    servers: Mapping[str, float]
    """Name of a server -> its process and all processes below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Cores in use, on average, between two snapshots."""

    server: float
    client: float
    idle_servers: Mapping[str, float]
    others: float
    """Everything that is neither a server nor this client."""


def load_between(start: Snapshot, end: Snapshot, server: str) -> Load:
    """`server` is the one that had requests."""
    seconds = end.at - start.at
    cores = {name: (end.servers[name] - start.servers[name]) / seconds for name in end.servers}
    client = (end.client - start.client) / seconds
    others = (end.busy - start.busy) / seconds - client - sum(cores.values())
    return Load(
        server=cores[server],
        client=client,
        idle_servers={name: used for name, used in cores.items() if name != server},
        others=max(0.0, others),
    )


def snapshot(processes: Mapping[str, int]) -> Snapshot:
    """`processes`: name of a server -> id of the process that listens."""
    seconds, parents = _all_processes()
    return Snapshot(
        at=time.perf_counter(),
        busy=_machine_seconds(),
        client=seconds[os.getpid()],
        servers={name: _tree_seconds(pid, seconds, parents) for name, pid in processes.items()},
    )


def listener(port: int) -> int | None:
    """The process that listens on a TCP port of this machine, if this user may see it."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in (PROC / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    for process in PROC.glob("[0-9]*"):
        try:
            if any(os.readlink(entry) in sockets for entry in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:  # the process or the file is gone, or is somebody else's
            continue
    return None


def machine() -> dict[str, object]:
    """The processor, its cores and the flags that matter."""
    fields = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in (PROC / "cpuinfo").read_text().splitlines())
    }
    present = fields["flags"].split()
    return {
        "cpu": fields["model name"],
        "family_model": f"{fields['cpu family']}/{fields['model']}",
        "cores": os.cpu_count(),
        "flags": [flag for flag in FLAGS.split() if flag in present],
        "kernel": os.uname().release,
    }


def _all_processes() -> tuple[dict[int, float], dict[int, int]]:
    """Process -> its processor seconds; process -> its parent."""
    ticks = os.sysconf("SC_CLK_TCK")
    seconds: dict[int, float] = {}
    parents: dict[int, int] = {}
    for process in PROC.glob("[0-9]*"):
        try:
            # The name, in brackets, may hold spaces.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # ended in the meantime
            continue
        parents[int(process.name)] = int(fields[1])
        seconds[int(process.name)] = (int(fields[11]) + int(fields[12])) / ticks
    return seconds, parents


def _tree_seconds(pid: int, seconds: Mapping[int, float], parents: Mapping[int, int]) -> float:
    total = seconds.get(pid, 0.0)
    return total + sum(_tree_seconds(child, seconds, parents) for child in parents if parents[child] == pid)


def _machine_seconds() -> float:
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(
        int, (PROC / "stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
