"""Checked reads of JSON files that came with a model, where every key may be missing or hold anything.

Each complaint is one line: the file, the key, the value found, what is supported. It knows no key's meaning.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from legato.errors import ModelError

MAX_BYTES = 2**28
"""Of one file. The largest in use, tokenizer.json of vocabularies of 260,000 tokens, have 35 million."""
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

    def number_within(self, key: str, least: float, most: float) -> float:
        """A number from `least` to `most`."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.error(key, f"a number from {least:g} to {most:g}")
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


def read_json_object(path: Path, *, optional: bool = False) -> JsonObject:
    """The JSON object in the file at `path`; an empty one if `optional` and there is no such file.

    Raises ModelError if it is missing, cannot be read or holds something else.
    """
    content = read_small_file(path)
    if content is None:
        if optional:
            return JsonObject(values={}, where=str(path))
        raise ModelError(f"{path}: is missing")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return JsonObject(values=value, where=str(path))


def read_small_file(path: Path) -> bytes | None:
    """The content of a file that is not the weights, None if there is none. Raises ModelError."""
    try:
        # Looked at before it is opened: opening a pipe would wait for ever, and a device may never end.
        if path.exists() and not path.is_file():
            raise ModelError(f"{path}: is {'a folder' if path.is_dir() else 'not a file'}")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelError(f"{path}: has {size} bytes; at most {MAX_BYTES} are read")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
