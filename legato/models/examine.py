"""Signs that the numbers in a model's file are not a model: what a full disk or a broken download leaves.

Nothing is known of the file, so only what no model has is refused: a long run of zero bytes that begins or
ends in the middle of a row, and a row whose numbers are a thousand times those of its matrix. Rows of zeros
are fine (padded vocabularies, pruned layers). A changed digit is not found.
"""

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from legato.errors import ModelError
from legato.models.gguf_file import GgufFile

logger = logging.getLogger(__name__)

PROBE = 1024
"""Bytes from one look at a tensor's bytes to the next."""
LONG_RUN = 4 * PROBE
"""Bytes: a page of a disk or of memory."""
NEAR_BOUNDARY = 64
"""Bytes by which a run may pass the ends of its rows: those of the rows beside it may be zero as well."""
ABSURD = 1000.0
"""Root mean squares of two rows of one matrix never differ by this factor."""

Bytes = npt.NDArray[np.uint8]


class Stored(NamedTuple):
    """A tensor's bytes as they lie in a file."""

    name: str
    data: Bytes
    row: int
    """Bytes."""


class Weights(Protocol):
    """Tensors by Legato's name; each is taken once."""

    def pop(self, name: str, /) -> Tensor: ...


class ExaminedWeights:
    """Weights whose scales are looked at as they are taken."""

    def __init__(self, weights: Weights, path: Path) -> None:
        self._weights = weights
        self._path = path

    def pop(self, name: str) -> Tensor:
        """Raises `ModelError` for a matrix with absurd rows."""
        weight = self._weights.pop(name)
        if weight.ndim == 2:
            problem = absurd_row(weight)
            if problem is not None:
                raise ModelError(f"{self._path}: damaged: {name}, {problem}")
        return weight


def absurd_row(weight: Tensor) -> str | None:
    """What is wrong with the scales of a matrix's rows, in words."""
    scales = weight.float().norm(dim=1) if weight.dtype.itemsize < 4 else weight.norm(dim=1)
    present = scales[scales > 0]
    if not len(present):
        return None
    usual, largest = float(present.median()), float(scales.max())
    if largest <= ABSURD * usual:
        return None
    return f"row {int(scales.argmax())}: its numbers are {largest / usual:,.0f} times those of the other rows"


def check_bytes(path: Path, gguf: GgufFile | None) -> None:
    """Raises `ModelError` for a tensor with a hole of zeros."""
    for stored in _in_gguf(gguf) if gguf is not None else _in_safetensors(path):
        if stored.row == len(stored.data):  # one row: a norm, or a bias, parts of which may be zeros
            continue
        for start, end in zero_runs(stored.data):
            if start == 0 and end == len(stored.data):
                logger.warning("%s: tensor %.80s holds nothing but zeros", path, stored.name)
            elif not _between_rows(start, end, stored):
                raise ModelError(
                    f"{path}: damaged: tensor {stored.name[:80]!r} has {end - start} zero bytes from byte "
                    f"{start} on, in the middle of its rows of {stored.row} bytes; was it copied or fetched "
                    "in full?"
                )


def zero_runs(data: Bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each run of at least `LONG_RUN` zero bytes."""
    words = data[: len(data) // 8 * 8].view(np.uint64)
    empty = np.flatnonzero(words[:: PROBE // 8] == 0)
    if len(empty) < LONG_RUN // PROBE:
        return
    groups = np.split(empty, np.flatnonzero(np.diff(empty) > 1) + 1)
    for group in groups:
        low, high = int(group[0]) * PROBE, int(group[-1]) * PROBE + 8
        if len(group) < LONG_RUN // PROBE or data[low:high].any():
            continue
        before = np.flatnonzero(data[max(low - PROBE, 0) : low])
        after = np.flatnonzero(data[high : high + PROBE])
        start = max(low - PROBE, 0) + (int(before[-1]) + 1 if len(before) else 0)
        end = high + (int(after[0]) if len(after) else len(data[high : high + PROBE]))
        yield start, end


def _between_rows(start: int, end: int, stored: Stored) -> bool:
    """Whether a run covers whole rows."""
    near = min(NEAR_BOUNDARY, stored.row // 4)
    return -start % stored.row <= near and (end % stored.row <= near or end == len(stored.data))


def _in_gguf(file: GgufFile) -> Iterator[Stored]:
    for tensor in file.tensors.values():
        yield Stored(tensor.name, tensor.data, max(len(tensor.data) // math.prod(tensor.shape[:-1]), 1))


def _in_safetensors(path: Path) -> Iterator[Stored]:
    """Its header was checked by the library that reads it."""
    mapped = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:start].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        num_rows = math.prod(entry["shape"][:-1]) or 1
        yield Stored(name, mapped[start + first : start + end], max((end - first) // num_rows, 1))
