"""One GGUF file, read and checked: its metadata as Python values, its tensors as views of the mapped file.

It knows the container (GGUF 2 and 3, little-endian), not what the keys or tensors of any model mean. No
number in the file is believed: each count is checked against the bytes that are left before anything is read
or reserved, so a damaged or hostile file costs little memory and time.

The container is parsed here and not with `gguf.GGUFReader`: that one needs 5 to 8 s for a vocabulary of
150,000 to 260,000 tokens, does not notice the end of the file, and loops for ever on an absurd array length.
The value types, and the tensor types with their block sizes, are that library's.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from legato.errors import ModelError

Scalar = bool | int | float | str
Value = Scalar | list[bool] | list[int] | list[float] | list[str]
T = TypeVar("T", bound=Scalar)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
# The least that one entry can take: key, type and a value of one byte; name, one dimension, type and offset.
MIN_FIELD_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_NUMBERS: dict[int, np.dtype[np.generic]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor as it lies in the file."""

    path: Path
    """The file; of a split model, the part that holds it."""
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Elements, slowest dimension first ([out, in] for matrices): GGUF's own order reversed."""
    data: npt.NDArray[np.uint8]
    """[bytes] read-only view of the file; whole blocks of `kind`, row after row."""


class GgufFile:
    """A GGUF file, opened and checked once.

    Raises ModelError, one line with the path, for whatever is wrong with the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        cursor = _Cursor(path, _map_file(path))
        num_tensors, num_fields = _read_header(cursor)
        self.metadata: dict[str, Value] = _read_metadata(cursor, num_fields)
        self.tensors: dict[str, GgufTensor] = _read_tensors(cursor, num_tensors, self.metadata)

    @property
    def architecture(self) -> str:
        """`general.architecture`, such as "llama"."""
        return self.get("general.architecture", str)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`, which must be of type `kind` (an integer may stand for a float).

        `default` is for an absent key; without one the key must be there. Raises ModelError.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: metadata key {key} is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(
                f"{self.path}: metadata key {key} is a {type(value).__name__}, not a {kind.__name__}"
            )
        return value


class _Cursor:
    """Reads forward through the mapped file; never past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.what = "the header"

    def fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{self.path}: {problem}")

    def need(self, num_bytes: int) -> int:
        """Where `num_bytes` start that are there to read; moves behind them."""
        start = self.at
        if num_bytes > len(self.data) - start:
            self.fail(
                f"truncated or damaged in {self.what}: needs {num_bytes} bytes at byte {start}, "
                f"the file has {len(self.data)} bytes"
            )
        self.at = start + num_bytes
        return start

    def u32(self) -> int:
        (value,) = _U32.unpack_from(self.data, self.need(4))
        return int(value)

    def u64(self) -> int:
        (value,) = _U64.unpack_from(self.data, self.need(8))
        return int(value)

    def count(self, what: str, min_bytes: int) -> int:
        """A number of entries that each take at least `min_bytes` of what is left."""
        count = self.u64()
        left = len(self.data) - self.at
        if count * min_bytes > left:
            self.fail(f"damaged: claims {count} {what}, but only {left} bytes are left")
        return count

    def text(self) -> str:
        length = self.u64()
        start = self.need(length)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            self.fail(f"damaged: {self.what} holds text that is not UTF-8 at byte {start}")

    def texts(self, count: int) -> list[str]:
        """`count` strings; the loop over a vocabulary, so it is written out flat."""
        data, at, size = self.data, self.at, len(self.data)
        unpack = _U64.unpack_from
        texts = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > size:
                    self.fail(
                        f"truncated or damaged in {self.what}: a string at byte {start} ends at byte {at}"
                    )
                texts.append(data[start:at].decode())
        except struct.error:
            self.fail(f"truncated in {self.what}: the file has {size} bytes")
        except UnicodeDecodeError:
            self.fail(f"damaged: {self.what} holds text that is not UTF-8 at byte {start}")
        self.at = at
        return texts


def _map_file(path: Path) -> mmap.mmap:
    try:
        # Before it is opened: opening a pipe would wait for ever.
        if not path.is_file():
            problem = (
                "is a folder" if path.is_dir() else "is not a file" if path.exists() else "does not exist"
            )
            raise ModelError(f"{path}: {problem}; expected a GGUF file")
        with path.open("rb") as file:
            start = file.read(8)
            if not start.startswith(MAGIC):
                found = f"starts with {start[:4]!r}" if start else "is empty"
                raise ModelError(f"{path}: not a GGUF file: it {found}, not with {MAGIC!r}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of tensors and of metadata fields."""
    cursor.need(len(MAGIC))
    version = cursor.u32()
    if version & 0xFFFF == 0:
        cursor.fail("is a big-endian GGUF file, which is not supported")
    if version not in VERSIONS:
        cursor.fail(f"GGUF version {version} is not supported (supported: {VERSIONS[0]} and {VERSIONS[1]})")
    num_tensors = cursor.count("tensors", MIN_TENSOR_BYTES)
    return num_tensors, cursor.count("metadata fields", MIN_FIELD_BYTES)


def _read_metadata(cursor: _Cursor, num_fields: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for i in range(num_fields):
        cursor.what = f"metadata field {i} of {num_fields}"
        key = cursor.text()
        if not key or key in metadata:
            cursor.fail(f"damaged: {cursor.what} has {'no' if not key else 'a repeated'} key {_quote(key)}")
        cursor.what = f"metadata field {_quote(key)}"
        metadata[key] = _read_value(cursor, cursor.u32())
    return metadata


def _read_value(cursor: _Cursor, kind: int) -> Value:
    if kind == GGUFValueType.STRING:
        return cursor.text()
    if kind == GGUFValueType.ARRAY:
        item_kind = cursor.u32()
        if item_kind == GGUFValueType.STRING:
            return cursor.texts(cursor.count(f"strings in {cursor.what}", 8))
        numbers = _number_type(cursor, item_kind)
        return _read_numbers(cursor, numbers, cursor.count(f"numbers in {cursor.what}", numbers.itemsize))
    value = _read_numbers(cursor, _number_type(cursor, kind), 1)[0]
    if kind == GGUFValueType.FLOAT32 and math.isfinite(value):
        # The shortest decimal of this float32: 1e-06, as config.json has it, and not 9.999999974752427e-07.
        return float(str(np.float32(value)))
    return value


def _number_type(cursor: _Cursor, kind: int) -> np.dtype[np.generic]:
    if kind not in _NUMBERS:
        cursor.fail(f"damaged: {cursor.what} has unknown value type {kind}")
    return _NUMBERS[kind]


def _read_numbers(
    cursor: _Cursor, numbers: np.dtype[np.generic], count: int
) -> list[bool] | list[int] | list[float]:
    start = cursor.need(count * numbers.itemsize)
    values: list[bool] | list[int] | list[float] = np.frombuffer(cursor.data, numbers, count, start).tolist()
    return values


def _read_tensors(cursor: _Cursor, num_tensors: int, metadata: dict[str, Value]) -> dict[str, GgufTensor]:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        cursor.fail(f"damaged: general.alignment is {alignment!r}, not a power of two")
    entries = [_read_tensor_entry(cursor, i, num_tensors) for i in range(num_tensors)]
    data_start = _aligned(cursor.at, alignment)
    size = len(cursor.data)
    needed = max((data_start + offset + num_bytes for _, _, _, offset, num_bytes in entries), default=size)
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset, num_bytes in entries:
        start = data_start + offset
        if name in tensors:
            cursor.fail(f"damaged: tensor {_quote(name)} is there twice")
        if offset % alignment:
            cursor.fail(f"damaged: tensor {_quote(name)} starts at {offset}, not a multiple of {alignment}")
        if start + num_bytes > size:
            cursor.fail(
                f"truncated: tensor {_quote(name)} ends at byte {start + num_bytes}; "
                f"the file has {size} bytes and needs {needed}"
            )
        data = np.frombuffer(cursor.data, np.uint8, num_bytes, start)
        tensors[name] = GgufTensor(path=cursor.path, name=name, kind=kind, shape=shape, data=data)
    _check_layout(
        cursor,
        sorted((offset, num_bytes, name) for name, _, _, offset, num_bytes in entries),
        data_start=data_start,
        alignment=alignment,
    )
    return tensors


def _check_layout(
    cursor: _Cursor, places: list[tuple[int, int, str]], *, data_start: int, alignment: int
) -> None:
    """Refuse a file whose tensors do not lie one after another, each padded to `alignment`, to its end.

    Every writer lays them out so. Then no two tensors share bytes, and an entry that is missing or wrong
    leaves a gap.
    `places`: (offset, bytes, name) of each tensor, by offset.
    """
    end, before = 0, "the start of the data"
    for offset, num_bytes, name in places:
        if offset != _aligned(end, alignment):
            problem = "overlap" if offset < end else "leave a gap"
            cursor.fail(
                f"damaged: its tensors {problem}: {_quote(name)} starts at {offset}, "
                f"after {before} it must be {_aligned(end, alignment)}"
            )
        end, before = offset + num_bytes, f"{_quote(name)} at {offset} with {num_bytes} bytes"
    size, most = len(cursor.data), data_start + _aligned(end, alignment)
    if size > most:
        cursor.fail(
            f"damaged: {size - most} of its {size} bytes belong to no tensor: "
            f"after {before} it must end at byte {most} or before (are entries missing?)"
        )


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _read_tensor_entry(
    cursor: _Cursor, i: int, num_tensors: int
) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int, int]:
    """(name, kind, shape, offset from the start of the data, bytes of data)"""
    cursor.what = f"tensor entry {i} of {num_tensors}"
    name = cursor.text()
    cursor.what = f"the entry of tensor {_quote(name)}"
    num_dims = cursor.u32()
    if not name or not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(
            f"damaged: {cursor.what} has {num_dims} dimensions (1 to {MAX_DIMS} and a name are needed)"
        )
    dims = [cursor.u64() for _ in range(num_dims)]
    kind_id = cursor.u32()
    offset = cursor.u64()
    try:
        kind = GGMLQuantizationType(kind_id)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        cursor.fail(f"tensor {_quote(name)} has unknown type {kind_id}")
    if 0 in dims or dims[0] % block_elements:
        cursor.fail(
            f"damaged: tensor {_quote(name)} of type {kind.name} has dimensions {dims}; "
            f"they must be positive and the first a multiple of {block_elements}"
        )
    num_bytes = math.prod(dims) // block_elements * block_bytes
    return name, kind, tuple(reversed(dims)), offset, num_bytes


def _quote(name: str) -> str:
    """A name from the file as one short line of a message."""
    return repr(name[:80])
