"""Text that knows who wrote each of its characters: the chat template, the assistant, or a client.

A chat template joins its own markup and the text of strangers to one prompt. `Written` carries the origin of
every character through what templates do with text: joining, slicing, stripping, splitting, replacing. An
operation that is not followed here returns an ordinary `str`, and an ordinary `str` counts as a client's. So
a mistake can turn markup into plain text, never plain text into markup. Does not know templates or tokens.
"""

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Self, SupportsIndex


class Origin(IntEnum):
    """Who wrote a character."""

    CLIENT = 0
    ASSISTANT = 1
    """A reply of the model that comes back in a conversation."""
    TEMPLATE = 2
    END = 3
    """Not text: marks the place where the last message of a conversation ends."""


class Written(str):
    """A text with the origin of each character. Equal to the `str` of the same characters."""

    __slots__ = ("_origins",)
    _origins: bytes

    def __new__(cls, text: str, origins: bytes) -> Self:
        """`origins` has one byte for each character."""
        written = super().__new__(cls, text)
        written._origins = origins
        return written

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return Written(str.__add__(self, other), self._origins + origins_of(other))

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return Written(str.__add__(other, self), origins_of(other) + self._origins)

    def __mul__(self, count: SupportsIndex) -> str:
        return Written(str.__mul__(self, count), self._origins * count)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> "Written":
        if isinstance(key, slice):
            return Written(str.__getitem__(self, key), self._origins[key])
        return Written(str.__getitem__(self, key), bytes((self._origins[key],)))

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def join(self, parts: Iterable[str], /) -> str:
        return joined(self, parts)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._located(str.splitlines(self, True), 0)
        if keepends:
            return lines
        return [line[: len(bare)] for line, bare in zip(lines, str.splitlines(self), strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._cut(str.find(self, sep), sep) if sep in self else (self, "", "")

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._cut(str.rfind(self, sep), sep) if sep in self else ("", "", self)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return joined(new, self.split(old, count))

    def upper(self) -> str:
        return self._mapped(str.upper(self))

    def lower(self) -> str:
        return self._mapped(str.lower(self))

    def capitalize(self) -> str:
        return self._mapped(str.capitalize(self))

    def title(self) -> str:
        return self._mapped(str.title(self))

    def _located(self, pieces: list[str], gap: int) -> list[str]:
        """The pieces of this text, in their order, with their origins. `gap` characters lie between two.
        Where a piece begins later, only blanks were skipped, and no piece begins with one."""
        located: list[str] = []
        position = 0
        for piece in pieces:
            position = str.find(self, piece, position)
            located.append(self[position : position + len(piece)])
            position += len(piece) + gap
        return located

    def _mapped(self, text: str) -> str:
        """The text after a change of each character. Unicode can make two of one; then nothing is known."""
        return Written(text, self._origins) if len(text) == len(self) else text

    def _cut(self, start: int, sep: str) -> tuple[str, str, str]:
        if not sep:
            raise ValueError("empty separator")
        return self[:start], self[start : start + len(sep)], self[start + len(sep) :]


def origins_of(text: str) -> bytes:
    """The origin of each character: a client's where nothing is known."""
    return text._origins if isinstance(text, Written) else bytes(len(text))


def written(text: str, origin: Origin) -> Written:
    """A text that is all of one origin."""
    return Written(text, bytes((origin,)) * len(text))


def joined(separator: str, parts: Iterable[str]) -> Written:
    """`separator.join(parts)` with the origins of both."""
    texts = list(parts)
    origins = origins_of(separator).join([origins_of(text) for text in texts])
    return Written(str.join(separator, texts), origins)


def with_origin(value: object, origin: Origin) -> object:
    """A copy of a JSON value in which every text is of one origin. The keys of objects stay as they are."""
    if isinstance(value, str):
        return written(value, origin)
    if isinstance(value, list):
        return [with_origin(item, origin) for item in value]
    if isinstance(value, dict):
        return {key: with_origin(item, origin) for key, item in value.items()}
    return value


def runs(text: Written, *origins: Origin) -> Iterator[tuple[int, int]]:
    """(start, end) of each longest run of characters that are all of one of the `origins`."""
    kinds = re.escape(bytes(origins))
    for found in re.finditer(b"[" + kinds + b"]+", origins_of(text)):
        yield found.span()
