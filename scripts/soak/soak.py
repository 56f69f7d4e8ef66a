"""A soak: for minutes, random clients bring twice what the server can do, vanish, send garbage, read slowly.

    make soak                                       10 minutes on the packaged demo model
    python scripts/soak/soak.py --seconds 60 --seed 7 -- path/to/model.gguf --policy fcfs

Starts a server on a free port with the arguments behind `--`, measures what it can do, and then lets clients
come, work at twice that rate and trouble (see `visitors`) at half of it. Judges:

- every status is one that the client in question may get; no 5xx but 504 for a client's own timeout
- no gap of a polite stream is longer than --max-gap times the target, no turn of the event loop longer
  than --max-turn; refusals (429) are answers, not faults, and are counted
- every answer is whole, and the greedy reply the same to the bit, before, amid and after
- the memory of the process grows by less than --max-growth MiB in the last two thirds of the time (in less
  than some minutes much of it is taken for the first time: give more)
- afterwards nobody runs or waits, no block is used, and as many files are open as before
- /health was 200 all the time, and the log has no traceback and no error
- SIGTERM, with replies running, ends the process with status 0, at most 5 s after --shutdown-timeout

Prints one JSON report; status 1 if anything of it is not so. Needs nothing but Python and Linux.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from crowds import CROWDS
from figures import BUSY, Watch, growth, metrics, num_files
from visitors import CANON, COMPLETIONS, MAX_BODY, TROUBLE, WORK, Kind, Visitor, WrongAnswerError
from wire import ask

SCRIPTS = Path(__file__).resolve().parent.parent
READY = "Legato is ready on "
CLIENTS_AT_ONCE = 48
"""While the capacity is measured: more than run at once, fewer than would be refused."""
REFUSED_WAIT_S = 0.5
SHUTDOWN_S, EXIT_S, CALM_S = 15.0, 5.0, 60.0
SERVE = (
    *("--max-running", "16", "--max-waiting", "32", "--num-blocks", "64"),
    *("--max-body-size", str(MAX_BODY), "--send-timeout", "8", "--timeout-keep-alive", "20"),
    *("--shutdown-timeout", str(SHUTDOWN_S), "--step-timeout", "60"),
)
"""Small limits, so that the queue, the KV cache and the timeouts are reached. The target is automatic."""
DESCRIPTORS = 512


@dataclass(slots=True)
class Tally:
    """What the clients of one phase met."""

    statuses: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def visit(self, kind: Kind, visitor: Visitor) -> None:
        try:
            status = await kind.act(visitor)
        except Exception as error:
            status = None
            self.faults.append(f"{kind.name}: {type(error).__name__}: {error}")
        else:
            if status not in kind.allowed:
                self.faults.append(f"{kind.name}: status {status}")
        self.statuses[kind.name, status] += 1

    def total(self, status: int) -> int:
        return sum(count for (_, each), count in self.statuses.items() if each == status)

    def as_json(self) -> dict[str, dict[str, int]]:
        table: dict[str, dict[str, int]] = {}
        for (name, status), count in sorted(self.statuses.items(), key=str):
            table.setdefault(name, {})["none" if status is None else str(status)] = count
        return table


@dataclass(slots=True)
class Soak:
    """One run against one server process."""

    port: int
    pid: int
    rng: random.Random
    most_s: float
    """For how long a client that does nothing stays at most."""
    canon: object = None

    def visitor(self) -> Visitor:
        return Visitor(self.port, random.Random(self.rng.randrange(2**63)), self.canon, self.most_s)

    def draw(self, kinds: Sequence[Kind]) -> Kind:
        return self.rng.choices(kinds, [kind.weight for kind in kinds])[0]

    async def capacity(self, seconds: float) -> float:
        """Requests of work answered in a second, with as many clients at once as keep it busy."""
        tally, until = Tally(), time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < until:
                num_refused = tally.total(429)
                await tally.visit(self.draw(WORK), self.visitor())
                if tally.total(429) > num_refused:  # Clients that retry at once would use the server's cores.
                    await asyncio.sleep(REFUSED_WAIT_S)

        began = time.monotonic()
        await asyncio.gather(*(client() for _ in range(CLIENTS_AT_ONCE)))
        return max(tally.total(200) / (time.monotonic() - began), 0.5)

    async def storm(self, rate: float, seconds: float) -> Tally:
        """Clients come at random, whatever became of those before; returns when the last has gone."""
        tally = Tally()
        arrivals = (
            self._arrivals(tally, WORK, 2 * rate, seconds),
            self._arrivals(tally, (*TROUBLE, *CROWDS), rate / 2, seconds),
        )
        await asyncio.gather(*arrivals)
        return tally

    async def _arrivals(self, tally: Tally, kinds: Sequence[Kind], rate: float, seconds: float) -> None:
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as visits:
            while time.monotonic() < until:
                visits.create_task(tally.visit(self.draw(kinds), self.visitor()))
                await asyncio.sleep(self.rng.expovariate(rate))

    async def reply(self) -> object:
        answer = await ask(self.port, COMPLETIONS, CANON)
        if answer.status != 200:
            raise WrongAnswerError(f"the plain greedy request: {answer.status} {answer.body[:300]!r}")
        return json.loads(answer.body)["choices"]

    async def calm(self, num_open: int) -> dict[str, float]:
        """The gauges of work and the open files, as soon as they are as at the start, or after a while."""
        until = time.monotonic() + CALM_S
        while True:
            now = await metrics(self.port)
            left = {name: now[name] for name in BUSY} | {"files": num_files(self.pid)}
            if (
                not any(left[name] for name in BUSY) and left["files"] <= num_open
            ) or time.monotonic() > until:
                return left
            await asyncio.sleep(0.5)

    async def end(self, process: subprocess.Popen[str]) -> tuple[float, int | None]:
        """SIGTERM while replies run: seconds until the process is gone, and its status."""
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        streams = [asyncio.create_task(ask(self.port, COMPLETIONS, body)) for _ in range(3)]
        await asyncio.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, SHUTDOWN_S + 30)
        await asyncio.gather(*streams, return_exceptions=True)
        return time.monotonic() - began, process.poll()


async def soak(process: subprocess.Popen[str], port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Everything but the log; `faults` lists what is not as it must be."""
    run = Soak(port, process.pid, random.Random(options.seed), min(20.0, options.seconds))
    run.canon = before = await run.reply()
    warm = Tally()
    for kind in WORK:  # what is opened once stays open
        await warm.visit(kind, run.visitor())
    rate = options.rate or await run.capacity(options.measure)
    num_open = num_files(process.pid)
    say(f"capacity {rate:.1f} requests a second; {options.seconds:g} s at twice that")
    watch = Watch(port, process.pid)
    watching = asyncio.create_task(watch.run())
    polite = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPTS / "soak" / "polite.py"), str(port), str(options.seconds)),
        stdout=subprocess.PIPE,
    )
    os.nice(10)  # these clients share the server's cores, and the polite one's gaps are to be the server's
    tally = await run.storm(rate, options.seconds)
    gap = float((await polite.communicate())[0] or "inf")
    watching.cancel()
    totals = await metrics(port)
    turn, target = (totals[f"legato_{name}_seconds"] for name in ("event_loop_longest_turn", "target"))
    left = await run.calm(num_open)
    after = await run.reply()
    seconds, status = await run.end(process)
    risen = growth(watch.memory)
    faults = warm.faults + tally.faults + watch.faults
    faults += [f"afterwards: {name} {value:g}" for name, value in left.items() if name in BUSY and value]
    if left["files"] > num_open:
        faults.append(f"{left['files']:g} open files, {num_open} before")
    if before != after:
        faults.append("the greedy reply differs after the soak")
    if risen > options.max_growth:
        faults.append(f"memory grew by {risen:.1f} MiB in the last two thirds")
    if gap > options.max_gap * target:
        faults.append(f"a gap of a polite stream of {gap:.3f} s at a target of {target:.3f} s")
    if turn > options.max_turn:
        faults.append(f"a turn of the event loop of {turn:.3f} s")
    if status != 0 or seconds > SHUTDOWN_S + EXIT_S:
        faults.append(f"SIGTERM: status {status} after {seconds:.1f} s")
    return {
        "seed": options.seed,
        "seconds": options.seconds,
        "capacity_per_s": round(rate, 2),
        "requests": sum(tally.statuses.values()),
        "statuses": tally.as_json(),
        "refused_429": tally.total(429),
        "target_s": round(target, 4),
        "polite_longest_gap_s": round(gap, 4),
        "longest_turn_s": round(turn, 4),
        "preemptions": totals["vllm:num_preemptions_total"],
        "most": watch.most,
        "memory_mib": [round(mib, 1) for _, mib in watch.memory[:: max(len(watch.memory) // 40, 1)]],
        "memory_growth_mib": round(risen, 2),
        "afterwards": left,
        "sigterm_s": round(seconds, 2),
        "faults": faults,
    }


def serve(arguments: list[str], log: Path) -> tuple[subprocess.Popen[str], int]:
    """A `legato serve` in a process of its own that logs to `log`, and its port."""
    command = [sys.executable, "-c", "from legato.cli.main import run; run()", "serve", "--port", "0"]
    template = ["--chat-template", str(SCRIPTS / "clients" / "chatml_tools.jinja")]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, *SERVE, *template, *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
            env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
        )
    assert process.stdout is not None
    ready = process.stdout.readline()
    if not ready.startswith(READY):
        process.wait()
        raise SystemExit(f"the server did not start:\n{log.read_text()}")
    return process, int(ready.split()[4].rpartition(":")[2])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description="Let random clients loose on a server.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--measure", type=float, default=15, help="seconds in which the capacity is measured")
    parser.add_argument("--rate", type=float, help="requests a second that it can do, without measuring")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-growth", type=float, default=24, help="MiB in the last two thirds")
    parser.add_argument("--max-gap", type=float, default=1.5, help="gap of a polite stream, over the target")
    parser.add_argument("--max-turn", type=float, default=0.1, help="seconds of the longest event-loop turn")
    options = parser.parse_args(sys.argv[1:at])
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process, port = serve(sys.argv[at + 1 :], log)
        try:
            report = asyncio.run(soak(process, port, options))
        finally:
            process.kill()
            process.wait()
        lines = log.read_text().splitlines()
    bad = [line for line in lines if "Traceback" in line or " ERROR " in line]
    report["faults"] += [f"log: {line}" for line in bad]
    if bad:
        say("\n".join(lines[-200:]))
    print(json.dumps(report, indent=1))
    return int(bool(report["faults"]))


if __name__ == "__main__":
    sys.exit(main())
