"""Norms and rotation of queries and keys, where they lie. Compiled by numba; knows addresses, no tensors."""

# numba's types describe only some of its uses.
# mypy: disallow-untyped-decorators=False, warn-return-any=False

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from legato.kernels import row_vector
from legato.kernels.cache import Kernel, Progress, source_version
from legato.kernels.team import Team, sharing, tuple_type
from legato.kernels.vector import next_number

_compiled: Any = numba.njit

_LITTLE = 1 << 14
"""Fewer numbers than this are for one thread: waking others would take longer."""
_ROWS = 16
"""What a thread takes at once."""


class Heads(NamedTuple):
    """Queries and keys of a step."""

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


def turn_kernel(progress: Progress) -> Kernel:
    """turn(team, heads)"""
    version = source_version()

    @_compiled(nogil=True)
    def turn(team: Team, work: int, heads: Heads) -> int:
        is_little = heads.num_rows * heads.num_heads * heads.dim < _LITTLE
        some = Team(team.state, 1) if is_little else team
        _share(some, work, _Context(heads, np.zeros(1, np.int64)))
        return version

    def work(address: int, worker: int) -> None:  # noqa: ARG001
        _turn_some(_get(address), version)

    return Kernel(turn, work, progress)


@_compiled
def _turn_some(c: _Context, _version: int) -> None:
    while True:
        first = next_number(c.counter.ctypes.data) * _ROWS
        if first >= c.heads.num_rows:
            break
        _turn_rows(c.heads, first, min(first + _ROWS, c.heads.num_rows))


@_compiled
def _turn_rows(heads: Heads, first: int, end: int) -> None:
    half, size = heads.dim // 2, heads.dim * 4
    for row in range(first, end):
        angle = row * half * 4
        for number in range(heads.num_heads):
            head = heads.address + row * heads.row + number * size
            if heads.gains:
                row_vector.norm(head, head, heads.dim, heads.gains + number * size, heads.eps)
            row_vector.turn(head, half, heads.cos + angle, heads.sin + angle)
