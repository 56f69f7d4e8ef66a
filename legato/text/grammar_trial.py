"""Tries out grammars in a process of its own (`grammar_worker`), within limits of time and memory.

A thread that compiles cannot be stopped, and the library's own limits do not bound all of its work. Knows
nothing of vocabularies but their size.
"""

import json
import math
import os
import re
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2
from typing import Any

from legato.errors import LegatoError, RequestError, UnavailableError

START_S = 60.0
"""For the process to start, on a machine that is busy."""
LOOK_S = 0.1
"""Between two looks at a process that is silent: whether somebody stopped it."""
_ADVICE = re.compile(r"\.? Enable '\w+' option\b.*", re.DOTALL)
"""What the library tells programs that use it. No client can set its options."""
_WORKER = Path(__file__).with_name("grammar_worker.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """A JSON Schema."""

    text: str
    strict: bool
    """A keyword that the library cannot follow is an error; else it is left out."""
    name: str = ""
    """The field that has it, for messages."""
    left_out: tuple[str, ...] = ()
    """Paths in it of what was left out already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A grammar as text."""

    format: str
    """lark, regex, json_schema, or grammar: GBNF or Lark, whichever it is."""
    text: str
    """Refers to a schema by its number between two NULs: `schema_at`."""
    schemas: tuple[Schema, ...] = ()


def schema_at(number: int) -> str:
    """What stands in a source's text for one of its schemas."""
    return f"\0{number}\0"


@dataclass(frozen=True, slots=True)
class Tried:
    """A grammar that compiles within the limits."""

    grammar: str
    """In the library's own form."""
    left_out: tuple[str, ...]
    """Keywords of schemas that the library cannot follow, as paths that begin with the schema's name."""


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
    """One process, started when it is first needed, and again after it ended. Not for many threads."""

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

    def run(self, source: Source) -> Tried:
        """`source` in a form that compiles within the limits here.

        Raises `RequestError` with the library's reason, or the limit, if it does not. Raises
        `UnavailableError` if the process was killed or stopped from outside, and so was the next one.
        """
        answer = self._answer(asdict(source))
        if not answer["error"]:
            before = [schema.name + path for schema in source.schemas for path in schema.left_out]
            now = [source.schemas[i].name + _spelled(path) for i, path in answer["left_out"]]
            return Tried(answer["grammar"], (*before, *now))
        if answer["schema"] is None:
            raise RequestError(reason(answer["error"]))
        name, path = source.schemas[answer["schema"]].name, _spelled(answer["path"])
        where = (name + path).removeprefix(".")
        raise RequestError((f"{where}: " if where else "") + reason(answer["error"]), param=name or None)

    def _answer(self, job: Mapping[str, object]) -> Mapping[str, Any]:
        left = self._seconds  # of all tries together
        for is_retry in (False, True):
            process, began = self._running(), time.monotonic()
            answer, failure = _asked(process, job, began + left)
            if answer is not None:
                return answer
            failure = self._ended(failure)
            left -= time.monotonic() - began
            if failure is _Failure.ENDED or (failure is _Failure.LATE and not is_retry):
                raise RequestError(
                    f"cannot be compiled within {self._seconds:g} s and {self._memory_mib} MiB of memory"
                )
            if left <= 0:
                break
        raise _unavailable()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        for _ in range(2):
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is for the server
            )
            weakref.finalize(self, _killed, self._process)
            answer, failure = _asked(self._process, self._first, time.monotonic() + START_S)
            if answer is not None:
                return self._process
            if self._ended(failure) is not _Failure.FROM_OUTSIDE:
                raise LegatoError("the process that compiles grammars does not start")
        raise _unavailable()

    def _ended(self, failure: "_Failure") -> "_Failure":
        """End the process after a `failure` and say whose fault it was."""
        process = self._process
        assert process is not None
        if failure is _Failure.ENDED and process.wait() in _OUTSIDE_SIGNALS:
            failure = _Failure.FROM_OUTSIDE
        self._end()
        return failure

    def _end(self) -> None:
        if self._process is not None:
            _killed(self._process)
            self._process = None


def _unavailable() -> UnavailableError:
    return UnavailableError("the process that compiles grammars was killed or stopped")


class _Failure(Enum):
    """Why a process gave no answer."""

    NONE = auto()
    LATE = auto()
    ENDED = auto()
    FROM_OUTSIDE = auto()
    """Somebody killed or stopped it."""


_OUTSIDE_SIGNALS = [-sent for sent in (SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2)]
"""Exit statuses of a process that did not end itself: a crash, or a lack of memory, has others."""


def _asked(
    process: "subprocess.Popen[bytes]", job: Mapping[str, object], deadline: float
) -> tuple[Mapping[str, Any] | None, _Failure]:
    """The answer to one line, or the reason why there is none."""
    assert process.stdin is not None
    assert process.stdout is not None
    unsent, answer = json.dumps(job).encode() + b"\n", b""
    os.set_blocking(process.stdin.fileno(), False)  # a process that is stopped does not read
    while not answer.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            return None, _Failure.LATE
        reads, writes = [process.stdout], [process.stdin] if unsent else []
        readable, writable, _ = select.select(reads, writes, [], min(left, LOOK_S))
        if not (readable or writable) and _is_stopped(process):
            return None, _Failure.FROM_OUTSIDE
        try:
            if writable:
                unsent = unsent[os.write(process.stdin.fileno(), unsent) :]
        except BrokenPipeError:
            return None, _Failure.ENDED
        if readable:
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                return None, _Failure.ENDED
            answer += part
    read: Mapping[str, Any] = json.loads(answer)
    return read, _Failure.NONE


def _is_stopped(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a signal stopped the process. Does not take its exit status."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: then the deadline ends it
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


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
    return _ADVICE.sub("", (precise or lines or ["not a grammar"])[0])[:300]


def _spelled(path: Sequence[str | int | None]) -> str:
    """.properties.city["a b"] for ("properties", "city", "a b")."""
    steps = [step for step in path if step is not None]
    return "".join(
        f".{step}"
        if isinstance(step, str) and re.fullmatch(r"\$?\w+", step, re.ASCII)
        else f"[{json.dumps(step)}]"
        for step in steps
    )
