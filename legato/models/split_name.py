"""The names of the parts of a split GGUF model: NAME-00001-of-0000N.gguf.

It knows names only; `gguf_split` opens the files.
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from legato.errors import ModelError

MOST_NAMED = 20
"""Missing parts in one message."""
_NAME = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitName:
    """The name of one part, taken apart."""

    base: str
    number: int
    """Of this part, from 1."""
    count: int
    """Parts of the model."""
    suffix: str = ".gguf"

    @property
    def parts(self) -> list[str]:
        """The names of all parts, in order."""
        return [f"{self.base}-{i:05}-of-{self.count:05}{self.suffix}" for i in range(1, self.count + 1)]


def split_name(name: str) -> SplitName | None:
    """`name` taken apart if it is that of one part; it may begin with folders. None for any other file."""
    found = _NAME.fullmatch(PurePosixPath(name).name)
    if found is None:
        return None
    number, count = int(found["number"]), int(found["count"])
    if not 1 <= number <= count:
        raise ModelError(f"{name}: part {number} of {count} cannot be; parts are numbered from 1 to {count}")
    return SplitName(base=found["base"], number=number, count=count, suffix=found["suffix"])


def first_part(folder: Path, split: SplitName) -> Path:
    """The path of the first part, once all parts are known to be in `folder`. Raises ModelError."""
    if missing := [name for name in split.parts if not (folder / name).exists()]:
        raise ModelError(
            f"{folder}: {len(missing)} of the {split.count} parts of {split.base} are missing: "
            f"{', '.join(missing[:MOST_NAMED])}"
        )
    return folder / split.parts[0]
