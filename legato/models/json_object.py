"""Checked reads of JSON files that came with a model, where every key may be missing or hold anything.

Each complaint is one line: the file, the key, the value found, what is supported. It knows no key's meaning.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.errors import ModelError

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonObject:
    """A JSON object, and where it stands."""

    values: Mapping[str, object]
    where: str
    """The file, for error messages."""
    prefix: str = ""
    """What leads to this object inside the file, such as `text_config.`."""

    def get(self, key: str) -> object:
        """The value as it is; None for null and for absent."""
        return self.values.get(key)

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.get(key) is not None

    def error(self, key: str, supported: str) -> ModelError:
        """The complaint about `key`, for the caller to raise."""
        found = f"is {self.values[key]!r}"[:200] if key in self.values else "is missing"
        return ModelError(f"{self.where}: {self.prefix}{key} {found}; supported: {supported}")

    def choice(self, key: str, choices: Collection[str]) -> str:
        """One of `choices`."""
        value = self.get(key)
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, ", ".join(choices))
        return value

    def integer(self, key: str, *, least: int = 1, most: int = _MOST) -> int:
        """A whole number from `least` to `most`."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(key, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, *, above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= _MOST:
            raise self.error(key, f"a number above {above:g}, at most {_MOST}")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """As `number`; None for null and for absent."""
        return self.number(key) if self.has(key) else None

    def flag(self, key: str) -> bool:
        """true or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def section(self, key: str) -> "JsonObject":
        """The object under `key`; an empty one for null and for absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return JsonObject(values=value or {}, where=self.where, prefix=f"{self.prefix}{key}.")

    def over(self, defaults: Mapping[str, object]) -> "JsonObject":
        """This object with `defaults` for the keys that are absent (a null stays null)."""
        return JsonObject(values={**defaults, **self.values}, where=self.where, prefix=self.prefix)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`. Raises ModelError if it cannot be read or is something else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value
