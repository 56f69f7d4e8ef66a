"""One request of a workload, before anybody serves it: when it comes, how long it is, whom it shares with.

Its prompt is made up: no trace has texts. Token ids are a function of the names of its parts, so that two
prompts share exactly the parts that they have in common from the start on.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_128
from itertools import pairwise
from typing import NamedTuple

from legato.errors import ConfigError

MAX_LENGTH = 10_000_000
"""Tokens of a prompt, and of a reply. No model takes more, and making up the tokens would take all memory."""
MAX_TIME = 1e12
"""Seconds. The time of a step must not be lost in the digits of the clock."""


class Part(NamedTuple):
    """A piece of a prompt. Parts of one name have the same tokens: the shorter one begins the longer."""

    name: str
    length: int
    """In tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request to come."""

    time: float
    """Seconds from the start of the workload."""
    parts: tuple[Part, ...]
    """The prompt, in order."""
    output_length: int
    """Tokens of the reply."""
    priority: int = 0
    """The lower, the more urgent."""
    tpot_target: float | None = None
    """Seconds between two tokens that are not to be exceeded; None for the server's target."""
    ttft_target: float | None = None
    """Seconds to the first token; None for the server's target."""
    patience: float | None = None
    """Seconds after which its client leaves, if it has not all of its reply by then."""

    @property
    def input_length(self) -> int:
        """Tokens of the prompt."""
        return sum(part.length for part in self.parts)

    def prompt(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The prompt's tokens, drawn from `ids`."""
        made: list[int] = []
        for part in self.parts:
            numbers = array("I", shake_128(part.name.encode()).digest(4 * part.length))
            num = len(ids)
            made += [ids[number % num] for number in numbers]
        return tuple(made)


def alone(name: str, length: int) -> tuple[Part, ...]:
    """The parts of a prompt that shares nothing with those of other names."""
    return (Part(name, length),)


def select(
    arrivals: Iterable[Arrival],
    *,
    start: float = 0.0,
    duration: float | None = None,
    limit: int | None = None,
) -> tuple[Arrival, ...]:
    """The first `limit` that come within `duration` seconds from `start` on, which is their time 0."""
    end = None if duration is None else start + duration
    within = (a for a in arrivals if a.time >= start and (end is None or a.time < end))
    chosen = [replace(arrival, time=arrival.time - start) for arrival in within]
    return tuple(chosen[:limit])


def scale(arrivals: Iterable[Arrival], *, lengths: float = 1.0, time: float = 1.0) -> tuple[Arrival, ...]:
    """Lengths and times multiplied: lengths of 0.125 for a machine that is slow, a time of 0.5 for twice the
    rate. Lengths are rounded, to 1 at least; shared parts stay shared.

    Raises `ConfigError` for what becomes too long or too late."""
    arrivals = tuple(arrivals)
    longest = max((max(a.input_length, a.output_length) for a in arrivals), default=0)
    if not longest * lengths <= MAX_LENGTH:
        raise ConfigError(
            f"a prompt or reply has {longest * lengths:g} tokens, at most {MAX_LENGTH:,} are simulated "
            f"(lengths are scaled by {lengths:g})",
            param="length_scale",
        )
    latest = max((a.time for a in arrivals), default=0.0)
    if not (time < math.inf and latest * time <= MAX_TIME):
        raise ConfigError(
            f"a request comes after {latest * time:g} s, at most {MAX_TIME:g} are simulated "
            f"(times are scaled by {time:g})",
            param="time_scale",
        )
    return tuple(
        replace(
            arrival,
            time=arrival.time * time,
            parts=_scaled(arrival.parts, lengths),
            output_length=max(round(arrival.output_length * lengths), 1),
        )
        for arrival in arrivals
    )


def _scaled(parts: Sequence[Part], factor: float) -> tuple[Part, ...]:
    """Ends are scaled and not lengths, so that rounding does not add up."""
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.length)
    lengths = [round(end * factor) - round(start * factor) for start, end in pairwise(ends)]
    kept = [Part(part.name, length) for part, length in zip(parts, lengths, strict=True) if length]
    return tuple(kept or [Part(parts[0].name, 1)])
