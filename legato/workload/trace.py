"""Recorded traffic from a file: times and lengths, no texts. The form is told by the content.

    TIMESTAMP,ContextTokens,GeneratedTokens            CSV, dates: Azure's traces as they are published
    timestamp,input_length,output_length               CSV, seconds: traces in the common form
    input_length,output_length                         CSV without times
    Timestamp,Model,Request tokens,Response tokens,..  CSV, seconds: BurstGPT
    {"timestamp": .., "input_length": .., "output_length": .., "hash_ids": [..]}
                                                       JSON lines, milliseconds: Mooncake. Each hash id is
                                                       512 tokens of the prompt; equal leading ids are a
                                                       shared prefix. Without hash_ids, nothing is shared

Columns may be in any order, and others beside them. Rows with no prompt or no reply are requests that failed
where the trace was recorded, and are left out.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from legato.errors import ConfigError
from legato.workload.arrival import MAX_LENGTH, MAX_TIME, Arrival, Part, alone

HASH_BLOCK = 512
"""Prompt tokens that one of Mooncake's hash ids stands for."""

MAX_LINE = 1 << 20
"""Characters of a line: more than the hash ids of the longest prompt take."""

Row = tuple[float, tuple[Part, ...], int]
"""Time, prompt, tokens of the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a file says."""

    arrivals: tuple[Arrival, ...]
    """By time."""
    timed: bool
    """Whether the file has times. Else all come at 0, and a `Rhythm` has to spread them."""


def read_trace(path: Path) -> Trace:
    """Raises `ConfigError` with the file, the line and what is wrong there."""
    lines = _read_lines(path)
    first = next((line for line in lines if line.strip()), "")
    is_json = first.lstrip().startswith("{")
    timed, rows = (True, _json_rows(path, lines)) if is_json else _csv_rows(path, lines)
    arrivals = [
        Arrival(time=time, parts=parts, output_length=output_length)
        for time, parts, output_length in rows
        if parts and output_length
    ]
    if not arrivals:
        raise ConfigError(f"trace {path}: holds no request")
    arrivals.sort(key=lambda arrival: arrival.time)
    if not is_json and DATE in first.split(","):
        arrivals = [replace(arrival, time=round(arrival.time - arrivals[0].time, 6)) for arrival in arrivals]
    return Trace(arrivals=tuple(arrivals), timed=timed)


def _read_lines(path: Path) -> list[str]:
    lines: list[str] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            while line := file.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:  # a device may never end
                    _failure(path, len(lines) + 1)(f"longer than {MAX_LINE:,} characters")
                lines.append(line.removesuffix("\n"))
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace {path}: not a text in UTF-8") from None
    return lines


DATE = "TIMESTAMP"
"""Name of the column that holds dates. Such a trace begins with its first request."""
COLUMNS = (
    ("timestamp", "input_length", "output_length"),
    ("Timestamp", "Request tokens", "Response tokens"),
    (DATE, "ContextTokens", "GeneratedTokens"),
)
"""Names of the same three columns; the first may be missing."""


def _csv_rows(path: Path, lines: list[str]) -> tuple[bool, Iterator[Row]]:
    reader = csv.DictReader(lines)
    header = reader.fieldnames or ()
    for time, prompt, reply in COLUMNS:
        if prompt in header and reply in header:
            timed = time in header
            break
    else:
        known = " or ".join(",".join(names) for names in COLUMNS)
        raise ConfigError(f"trace {path}, line 1: the header has to name {known}; it is {','.join(header)!r}")

    def rows() -> Iterator[Row]:
        for row in _read_rows(path, reader):
            fail = _failure(path, reader.line_num)
            at = _time(row, time, fail) if timed else 0.0
            length = _count(row, prompt, fail)
            yield at, alone(f"row {reader.line_num}", length) if length else (), _count(row, reply, fail)

    return timed, rows()


def _read_rows(path: Path, reader: "csv.DictReader[str]") -> Iterator[dict[str, str]]:
    try:
        yield from reader
    except csv.Error as error:
        _failure(path, reader.line_num)(f"not CSV ({error})")


def _json_rows(path: Path, lines: list[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fail = _failure(path, number)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            fail(f"not JSON ({str(error).partition(';')[0]})")
        if not isinstance(row, dict):
            fail("not a JSON object")
        length = _count(row, "input_length", fail)
        parts = alone(f"row {number}", length) if length else ()
        if "hash_ids" in row:
            parts = _parts(row["hash_ids"], length, fail)
        yield _time(row, "timestamp", fail) / 1000, parts, _count(row, "output_length", fail)


def _parts(hash_ids: object, length: int, fail: Callable[[str], NoReturn]) -> tuple[Part, ...]:
    """A part for each hash id; the last one may be shorter than the others."""
    needed = -(-length // HASH_BLOCK)
    if not isinstance(hash_ids, list) or not all(isinstance(i, int | str) for i in hash_ids):
        fail("hash_ids is not a list of ids")
    if len(hash_ids) != needed:
        fail(f"{length} prompt tokens are {needed} blocks of {HASH_BLOCK}; hash_ids has {len(hash_ids)}")
    rest = length - HASH_BLOCK * (needed - 1)
    lengths = [HASH_BLOCK] * (needed - 1) + [rest] * (needed > 0)
    return tuple(Part(f"hash {i}", n) for i, n in zip(hash_ids, lengths, strict=True))


def _failure(path: Path, line: int) -> Callable[[str], NoReturn]:
    def fail(what: str) -> NoReturn:
        raise ConfigError(f"trace {path}, line {line}: {what}")

    return fail


def _number(row: Mapping[str, object], name: str, fail: Callable[[str], NoReturn]) -> float:
    """A number that is not negative."""
    value = row.get(name)
    if value is None:
        fail(f"{name} is missing")
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        fail(f"{name} must be a number of at least 0, not {value!r:.40}")
    return number


def _time(row: Mapping[str, object], name: str, fail: Callable[[str], NoReturn]) -> float:
    """Seconds; of a date, those since 1970."""
    value = row.get(name)
    if name == DATE and isinstance(value, str):
        try:
            date = datetime.fromisoformat(value)
        except ValueError:
            fail(f"{name} must be a date such as 2023-11-16 18:15:46.68, not {value!r:.40}")
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    number = _number(row, name, fail)
    if number > MAX_TIME:
        fail(f"{name} must be at most {MAX_TIME:g}, not {number:g}")
    return number


def _count(row: Mapping[str, object], name: str, fail: Callable[[str], NoReturn]) -> int:
    """A whole number of tokens that is not negative."""
    number = _number(row, name, fail)
    if number > MAX_LENGTH:
        fail(f"{name} must be at most {MAX_LENGTH:,} tokens, not {number:g}")
    if not number.is_integer():
        fail(f"{name} must be a whole number, not {row[name]!r:.40}")
    return int(number)
