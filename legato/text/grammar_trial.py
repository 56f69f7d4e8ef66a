"""Tries out grammars in a process of its own (`grammar_worker`), within limits of time and memory.

A thread that compiles cannot be stopped, and the library's own limits do not bound all of its work. Knows
nothing of vocabularies but their size.
"""

import json
import math
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from legato.errors import LegatoError, RequestError

START_S = 60.0
"""For the process to start, on a machine that is busy."""
_WORKER = Path(__file__).with_name("grammar_worker.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A grammar as text."""

    format: str
    """lark, regex, json_schema, or grammar: GBNF or Lark, whichever it is."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimits:
    """The most work that a grammar may be: the library's own limits, by its own names."""

    max_grammar_size: int = 200_000
    """Symbols in a grammar's productions."""
    initial_lexer_fuel: int = 1_000_000
    max_lexer_states: int = 50_000
    """1 to 2 kB each, for every reply."""
    step_lexer_fuel: int = 50_000
    """For one token: some 4 milliseconds. All replies of a step wait for it."""
    step_max_items: int = 10_000
    """As `step_lexer_fuel`, for the parser."""
    verbose_errors: bool = False


class Trial:
    """One process, started when it is first needed, and again after it was killed. Not for many threads."""

    def __init__(self, *, num_ids: int, seconds: float, memory_bytes: int, limits: WorkLimits) -> None:
        """`num_ids` is how many token ids a grammar may name."""
        self._first = {
            "num_ids": num_ids,
            "memory_bytes": memory_bytes,
            "seconds": math.ceil(seconds) + 1,
            "limits": asdict(limits),
        }
        self._seconds = seconds
        self._memory_mib = memory_bytes >> 20
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, source: Source) -> str:
        """`source` in the library's own form, which compiles within the limits here. Raises `RequestError`
        with the library's reason, or the limit, if it does not."""
        answer = _asked(self._running(), asdict(source), self._seconds)
        if answer is None:
            self._end()
            raise RequestError(
                f"cannot be compiled within {self._seconds:g} s and {self._memory_mib} MiB of memory"
            )
        if answer["error"]:
            raise RequestError(reason(answer["error"]))
        return answer["grammar"]

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal is for the server
        )
        weakref.finalize(self, _killed, self._process)
        if _asked(self._process, self._first, START_S) is None:
            self._end()
            raise LegatoError("the process that tries out grammars does not start")
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            _killed(self._process)
            self._process = None


def _asked(
    process: "subprocess.Popen[bytes]", job: Mapping[str, object], seconds: float
) -> Mapping[str, str] | None:
    """The answer to one line; None if the process does not give it in time, or ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    answer = b""
    try:
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
        while not answer.endswith(b"\n"):
            left = max(deadline - time.monotonic(), 0.0)
            if not select.select([process.stdout], [], [], left)[0]:
                return None
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                return None
            answer += part
    except BrokenPipeError:
        return None
    read: Mapping[str, str] = json.loads(answer)
    return read


def _killed(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # what it did not read any more
            pipe.close()


def reason(error: str) -> str:
    """What a client may read of the library's message: one line, without states and positions in them."""
    if error.startswith("NoExtension"):
        return "no text has this form"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    precise = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (precise or lines or ["not a grammar"])[0][:300]
