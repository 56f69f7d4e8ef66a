"""Legato against other servers: one workload, one machine, one run.

    python -m benchmarks.peers --server legato=http://127.0.0.1:8000 llama.cpp=http://127.0.0.1:8401 \\
        --json out.json

Every server is up all the time, but only one has requests at a time, and the servers take turns within each
repeat, so that a machine that gets slower or faster does so for all. The first server named is compared with
the others. With every sample goes how much processor time idle servers and strangers took meanwhile; one that
strangers disturbed is taken again.
Servers must run on this machine, take token ids and answer POST /tokenize: benchmarks/README.md says how to
start each.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import httpx
from rich.console import Console

from benchmarks.measurements import MEASUREMENTS, Measurement, Numbers, warm_up
from benchmarks.peers_report import Row, Sample, rows_of, table_of
from benchmarks.processes import Load, listener, load_between, machine, snapshot
from benchmarks.prompts import Prompts, prompts_of
from benchmarks.streams import TIMEOUT, BenchmarkError, Server, version_of

REST_S = 1.0
"""Before each load: aborted work ends, thread pools stop waiting actively."""

QUIET_CORES = 0.1
"""Whoever takes more than this while a server is measured disturbs it."""

TRIES = 2
"""How often a disturbed measurement is made, at most."""


class Comparison:
    """Servers, their processes, and what was measured so far."""

    def __init__(self, servers: Sequence[Server], seed: int | None, patience: int) -> None:
        self.servers = servers
        self.samples: list[Sample] = []
        self.loads: list[tuple[str, Load]] = []
        self.versions: dict[str, str] = {}
        self._random = random.Random(seed)
        self._prompts: dict[str, Prompts] = {}
        self._patience = max(1, patience)
        self._processes = {server.name: _process_of(server) for server in servers}
        self._limits = httpx.Limits(max_connections=64)

    async def start(self) -> None:
        """Ask for versions and vocabularies and warm up, one server after the other."""
        for server in self.servers:
            async with self._client() as client:
                self.versions[server.name] = await version_of(client, server)
                self._prompts[server.name] = await prompts_of(client, server, self._random)
                await warm_up(client, server, self._prompts[server.name])

    async def repeat(self, number: int, measurements: Sequence[Measurement]) -> None:
        """Each measurement once on each server; another server begins in each repeat."""
        shift = number % len(self.servers)
        for measurement in measurements:
            for server in (*self.servers[shift:], *self.servers[:shift]):
                await self._sample(number, measurement, server)

    async def _sample(self, number: int, measurement: Measurement, server: Server) -> None:
        """Taken again, up to `TRIES` times, while strangers compute; the quietest one counts."""
        tries: list[tuple[Load, Numbers]] = []
        while len(tries) < TRIES and all(load.others > QUIET_CORES for load, _ in tries):
            await self._rest(server)
            start = snapshot(self._processes)
            async with self._client() as client:
                numbers = await measurement.measure(client, server, self._prompts[server.name])
            tries.append((load_between(start, snapshot(self._processes), server.name), numbers))
        load, numbers = min(tries, key=lambda each: each[0].others)
        self.loads.append((server.name, load))
        for key, value in numbers.items():
            self.samples.append(Sample(server=server.name, repeat=number, key=key, value=value))

    async def _rest(self, server: Server) -> None:
        """Until nobody computes, for `patience` seconds at most, and one second at least."""
        for _ in range(self._patience):
            start = snapshot(self._processes)
            await asyncio.sleep(REST_S)
            if load_between(start, snapshot(self._processes), server.name).others <= QUIET_CORES:
                return

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=TIMEOUT, limits=self._limits, trust_env=False)

    def disturbances(self) -> dict[str, float]:
        """The most cores that each idle server, and everything else, took while a server was measured."""
        worst = {
            f"{server.name} (idle)": max(
                (load.idle_servers[server.name] for name, load in self.loads if name != server.name),
                default=0.0,
            )
            for server in self.servers
        }
        return {**worst, "others": max(load.others for _, load in self.loads)}


def _process_of(server: Server) -> int:
    port = httpx.URL(server.url).port or 80
    pid = listener(port)
    if pid is None:
        raise BenchmarkError(f"{server.name}: no process of this machine listens on port {port}")
    return pid


def parse_server(text: str) -> Server:
    """name=URL[,model=..][,note=..]"""
    place, *extras = text.split(",")
    name, found, url = place.partition("=")
    fields = dict(extra.split("=", 1) for extra in extras if "=" in extra)
    if (
        not found
        or not url.startswith("http://")
        or len(fields) < len(extras)
        or fields.keys() - {"model", "note"}
    ):
        raise argparse.ArgumentTypeError(f"{text!r}: not name=http://host:port[,model=..][,note=..]")
    return Server(name=name, url=url.rstrip("/"), model=fields.get("model"), note=fields.get("note", ""))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Compare servers.")
    parser.add_argument(
        "--server",
        type=parse_server,
        nargs="+",
        action="extend",
        required=True,
        metavar="NAME=URL[,model=..]",
        help="also ,note=.. for the report; the first is compared with the others",
    )
    names = [measurement.name for measurement in MEASUREMENTS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=" ".join(names)
    )
    parser.add_argument(
        "--repeats",
        type=int,
        choices=range(1, 21),
        metavar="N",
        default=3,
        help="of every measurement on every server",
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="of the prompts; default: never the same twice"
    )
    parser.add_argument("--patience", type=int, default=20, help="seconds to wait for strangers, each time")
    parser.add_argument("--json", type=Path, help="where the samples, the medians and the machine go")
    return parser.parse_args()


def git_commit() -> str:
    """The commit of the working directory, with -dirty if tracked files differ."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def report(comparison: Comparison, rows: Sequence[Row]) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "legato_commit": git_commit(),
        "machine": machine(),
        "servers": [
            {**asdict(server), "version": comparison.versions[server.name]} for server in comparison.servers
        ],
        "results": [asdict(row) for row in rows],
        "most_cores_of": comparison.disturbances(),
        "samples": [asdict(sample) for sample in comparison.samples],
        "loads": [{"server": name, **asdict(load)} for name, load in comparison.loads],
    }


async def compare(options: argparse.Namespace, console: Console) -> None:
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(options.server, options.seed, options.patience)
    await comparison.start()
    chosen = [measurement for measurement in MEASUREMENTS if measurement.name in options.only]
    names = [server.name for server in options.server]
    for number in range(options.repeats):
        await comparison.repeat(number, chosen)
        console.print(f"repeat {number + 1} of {options.repeats} done", style="dim")
        if options.json is not None:  # each time: a run that is stopped has not been for nothing
            rows = rows_of(comparison.samples, names)
            options.json.write_text(json.dumps(report(comparison, rows), indent=1) + "\n")
    console.print(table_of(rows_of(comparison.samples, names), names))
    for who, cores in comparison.disturbances().items():
        console.print(f"{who}: at most {cores:.2f} cores", style="red" if cores > QUIET_CORES else "dim")


def main() -> int:
    options = arguments()
    status = 0
    try:
        asyncio.run(compare(options, Console()))
    except* (BenchmarkError, httpx.HTTPError, TimeoutError) as group:
        for error in group.exceptions:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
