"""Normalizes and rotates queries and keys in place (rotary embedding). Compiled by numba; it sees addresses
only."""

# numba's types describe only some of its uses.
# mypy: disallow-untyped-decorators=False, warn-return-any=False

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from legato.kernels import row_vector
from legato.kernels.cache import Kernel, source_version
from legato.kernels.thread_pool import PoolHandle, sharing, tuple_type
from legato.kernels.vector import next_number

_compiled: Any = numba.njit

_SERIAL_SIZE = 1 << 14
"""Fewer numbers than this are processed by one thread: waking others would take longer."""
_ROWS = 16
"""The rows that a thread takes at once."""


class Heads(NamedTuple):
    """The queries and keys of a step."""

    address: int  # of floats
    row: int  # bytes from one token to the next
    num_rows: int
    num_heads: int  # side by side, in each row
    dim: int
    gains: int  # address of [num_heads, dim] floats; 0: no norms
    eps: float
    cos: int  # addresses of [num_rows, dim / 2] floats
    sin: int


class _Context(NamedTuple):
    heads: Heads
    counter: Any  # [1]


_share, _get = sharing(
    tuple_type(_Context, heads=tuple_type(Heads), counter=types.Array(types.int64, 1, "C"))
)


def rope_kernel() -> Kernel:
    """rope(threads, heads)"""
    version = source_version()

    @_compiled(nogil=True)
    def rope(threads: PoolHandle, work: int, heads: Heads) -> int:
        is_small = heads.num_rows * heads.num_heads * heads.dim < _SERIAL_SIZE
        some = PoolHandle(threads.state, 1) if is_small else threads
        _share(some, work, _Context(heads, np.zeros(1, np.int64)))
        return version

    def work(address: int, worker: int) -> None:  # noqa: ARG001
        _rotate_shared(_get(address), version)

    return Kernel(rope, work)


@_compiled
def _rotate_shared(c: _Context, _version: int) -> None:
    while True:
        first = next_number(c.counter.ctypes.data) * _ROWS
        if first >= c.heads.num_rows:
            break
        _rotate_rows(c.heads, first, min(first + _ROWS, c.heads.num_rows))


@_compiled
def _rotate_rows(heads: Heads, first: int, end: int) -> None:
    half, size = heads.dim // 2, heads.dim * 4
    for row in range(first, end):
        angle = row * half * 4
        for number in range(heads.num_heads):
            head = heads.address + row * heads.row + number * size
            if heads.gains:
                row_vector.norm(head, head, heads.dim, heads.gains + number * size, heads.eps)
            row_vector.rotate(head, half, heads.cos + angle, heads.sin + angle)
