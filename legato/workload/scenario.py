"""Workloads that are described, not recorded: groups of requests that are alike.

    {"description": "8 streams, and a long prompt among them",
     "groups": [{"requests": 8, "prompt": 64, "output": 400},
                {"requests": 1, "at": 5, "prompt": 2000, "output": 16}]}

A few have names (`SCENARIOS`); others are JSON files of this form, each field of a group as in `Group`.
"""

import json
import random
from dataclasses import dataclass, fields
from pathlib import Path

from legato.config.bounded_file import read_bounded
from legato.errors import ConfigError
from legato.workload.arrival import MAX_LENGTH, Arrival, Part
from legato.workload.rhythm import Rhythm

LARGEST = 10**15
"""Of any number in a file."""
LONGEST = 1e9
"""Seconds, and milliseconds of a target."""
MAX_REQUESTS = 1_000_000


def check_number(num_requests: float) -> None:
    """Raises `ConfigError` for more requests than a workload has."""
    if not num_requests <= MAX_REQUESTS:
        raise ConfigError(
            f"a workload has at most {MAX_REQUESTS:,} requests, not {num_requests:.15g}", param="requests"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Requests that are alike."""

    prompt: int
    """Tokens of each prompt, beside those of `system`."""
    output: int
    """Tokens of each reply."""
    requests: int | None = None
    """How many. Default: as many as come in `duration`, or 1."""
    at: float = 0.0
    """When the first one comes, in seconds."""
    rate: float | None = None
    """Requests a second; None for all at once."""
    duration: float | None = None
    """Seconds for which they come at `rate`, in place of `requests`."""
    burstiness: float = 1.0
    """Of the gaps between them; see `Rhythm`."""
    spread: float = 0.0
    """Lengths are drawn evenly from (1 - spread) to (1 + spread) times `prompt` and `output`."""
    system: int = 0
    """Tokens of a system prompt that all requests share, also with other groups."""
    priority: int = 0
    tpot_target_ms: float | None = None
    ttft_target_ms: float | None = None
    patience: float | None = None
    """Seconds after which a client leaves."""

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "requests"):
            self._check(name, at_least=1)
        for name in ("at", "spread", "system"):
            self._check(name, at_least=0)
        for name in ("rate", "duration", "burstiness", "patience", "tpot_target_ms", "ttft_target_ms"):
            self._check(name, above=0)
        for name in ("prompt", "output", "system"):
            if getattr(self, name) > MAX_LENGTH:
                raise ConfigError(
                    f"{name} must be at most {MAX_LENGTH:,} tokens, not {getattr(self, name):.15g}",
                    param=name,
                )
        for name in ("at", "duration", "patience", "tpot_target_ms", "ttft_target_ms"):
            value = getattr(self, name)
            if value is not None and value > LONGEST:
                raise ConfigError(f"{name} must be at most {LONGEST:g}, not {value:g}", param=name)
        if self.spread > 1:
            raise ConfigError(f"spread must be at most 1, not {self.spread}", param="spread")
        if self.duration is not None and (self.rate is None or self.requests is not None):
            raise ConfigError("duration goes with rate, and not with requests", param="duration")
        num = (self.rate or 0.0) * (self.duration or 0.0) or self.requests or 1
        check_number(num)

    def _check(self, name: str, *, at_least: float | None = None, above: float | None = None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if at_least is not None and not value >= at_least:
            raise ConfigError(f"{name} must be at least {at_least}, not {value}", param=name)
        if above is not None and not value > above:
            raise ConfigError(f"{name} must be above {above}, not {value}", param=name)

    @property
    def num_requests(self) -> int:
        if self.rate is not None and self.duration is not None:
            return max(round(self.rate * self.duration), 1)
        return 1 if self.requests is None else self.requests

    def arrivals(self, name: str, draw: random.Random) -> list[Arrival]:
        """`name` tells its prompts from those of other groups."""
        num = self.num_requests
        times = (
            [0.0] * num
            if self.rate is None
            else Rhythm(rate=self.rate, burstiness=self.burstiness).times(num, draw)
        )
        shared = (Part("system", self.system),) * (self.system > 0)
        return [
            Arrival(
                time=self.at + time,
                parts=(*shared, Part(f"{name}, request {i}", self._length(self.prompt, draw))),
                output_length=self._length(self.output, draw),
                priority=self.priority,
                tpot_target=_seconds(self.tpot_target_ms),
                ttft_target=_seconds(self.ttft_target_ms),
                patience=self.patience,
            )
            for i, time in enumerate(times)
        ]

    def _length(self, mean: int, draw: random.Random) -> int:
        if not self.spread:
            return mean
        return max(round(draw.uniform((1 - self.spread) * mean, (1 + self.spread) * mean)), 1)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Groups that come together."""

    description: str
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        check_number(sum(group.num_requests for group in self.groups))

    def arrivals(self, seed: int) -> tuple[Arrival, ...]:
        """By time. The same seed gives the same requests."""
        draw = random.Random(seed)
        made = [
            arrival
            for number, group in enumerate(self.groups)
            for arrival in group.arrivals(f"seed {seed}, group {number}", draw)
        ]
        return tuple(sorted(made, key=lambda arrival: arrival.time))


def find_scenario(name_or_path: str) -> Scenario:
    """A built-in one or a file. Raises `ConfigError`: there is none of that name, or the file is wrong."""
    if name_or_path in SCENARIOS:
        return SCENARIOS[name_or_path]
    path = Path(name_or_path)
    if path.suffix != ".json":
        raise ConfigError(
            f"no scenario {name_or_path!r}; give one of {', '.join(SCENARIOS)}, or a .json file",
            param="scenario",
        )
    return read_scenario(path)


def read_scenario(path: Path) -> Scenario:
    """Raises `ConfigError` with the file, the group and what is wrong."""
    try:
        table = json.loads(read_bounded(path))
    except OSError as error:
        raise ConfigError(f"scenario {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]
        raise ConfigError(f"scenario {path}: not JSON ({reason})") from None
    if not isinstance(table, dict) or set(table) - {"description", "groups"}:
        raise ConfigError(f'scenario {path}: not an object of "description" and "groups"')
    groups, description = table.get("groups"), table.get("description", path.stem)
    if not isinstance(groups, list) or not groups:
        raise ConfigError(f"scenario {path}: groups is not a list with a group in it")
    if not isinstance(description, str):
        raise ConfigError(f"scenario {path}: description is not a text")
    read = []
    for number, group in enumerate(groups):
        try:
            read.append(_read_group(group))
        except ConfigError as error:
            raise ConfigError(
                f"scenario {path}: groups[{number}]: {error.message}", param=error.param
            ) from None
    return Scenario(description=description, groups=tuple(read))


WHOLE = ("prompt", "output", "requests", "system", "priority")
"""Fields of a group that are whole numbers; the others may have fractions."""


def _read_group(group: object) -> Group:
    if not isinstance(group, dict):
        raise ConfigError("not an object")
    known = [field.name for field in fields(Group)]
    for name, value in group.items():
        if name not in known:
            raise ConfigError(f"no such field {name!r}; there are {', '.join(known)}", param=name)
        if isinstance(value, bool) or not isinstance(value, int if name in WHOLE else int | float):
            kind = "a whole number" if name in WHOLE else "a number"
            raise ConfigError(f"{name} must be {kind}, not {value!r:.40}", param=name)
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ConfigError(f"{name} must be within {LARGEST:g}", param=name)
    for name in ("prompt", "output"):
        if name not in group:
            raise ConfigError(f"{name} is missing", param=name)
    return Group(**group)


SCENARIOS: dict[str, Scenario] = {
    "stall": Scenario(
        description="8 streams, and a prompt of 2,000 tokens that comes after 5 seconds",
        groups=(
            Group(requests=8, prompt=64, output=600),
            Group(requests=1, at=5, prompt=2000, output=16),
        ),
    ),
    "growing": Scenario(
        description="4 streams whose contexts grow from 64 to 8,000 tokens, and long prompts among them",
        groups=(
            Group(requests=4, prompt=64, output=7936),
            Group(requests=8, rate=0.05, burstiness=float("inf"), at=20, prompt=2000, output=16),
        ),
    ),
    "load-change": Scenario(
        description="one chat a second for a minute, three for the next, one again for the last",
        groups=tuple(
            Group(at=at, duration=60, rate=rate, prompt=300, output=60, spread=0.5, system=200)
            for at, rate in ((0, 1), (60, 3), (120, 1))
        ),
    ),
    "chat": Scenario(
        description="two minutes of chat: a message a second after a common system prompt",
        groups=(Group(duration=120, rate=1, prompt=300, output=100, spread=0.8, system=200),),
    ),
    "documents": Scenario(
        description="two minutes of chat, and a pasted document every ten seconds",
        groups=(
            Group(duration=120, rate=0.5, prompt=200, output=100, spread=0.8),
            Group(duration=120, rate=0.1, prompt=3000, output=80, spread=0.5),
        ),
    ),
}
"""By name."""
