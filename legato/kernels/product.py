"""Products of a step's rows with a packed matrix, and what comes right before and after, shared by threads.

Compiled by numba; knows addresses, no tensors. Three passes: rows are normalised and packed as integers;
tiles of rows are multiplied with panels of outputs, and gated; results are added to the residual stream if
they are for it. Which thread does what, and how rows are cut into tiles, changes no bit.

A matrix whose outputs are gated has its panels in turns: one of gates, one of what they are multiplied with.
"""

# numba's types describe only some of its uses.
# mypy: disallow-untyped-decorators=False, warn-return-any=False

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from legato.kernels import product_vector as vector
from legato.kernels import row_vector
from legato.kernels.cache import Kernel, source_version
from legato.kernels.product_vector import W8, W16, Format
from legato.kernels.thread_pool import PoolHandle, sharing, tuple_type
from legato.kernels.vector import VECTOR_BYTES, copy, next_number

_compiled: Any = numba.njit

FORMATS: dict[str, Format] = {"w16": W16, "w8": W8}
NO_GATE, SILU, GELU_TANH = range(3)

_BLOCK_BYTES = 1 << 18
"""How many bytes of packed rows meet a panel before the next panel: they stay in the cache."""
_PANELS = 8
"""The most panels that a thread takes at once, divided by the number of tiles."""
_LITTLE = 1 << 14
"""Fewer numbers than this are prepared or added by one thread: waking others would take longer."""
_SIZES_W16, _SIZES_W8 = np.array(W16.tiles), np.array(W8.tiles)
_ADDED = 16
"""Rows that a thread adds at once."""
_MOST_ROWS = max(*W16.tiles, *W8.tiles)


class Matrix(NamedTuple):
    """A packed matrix."""

    is_small: bool  # W8, not W16
    group: int
    panel: int
    row_group: int
    weight_group: int
    num_inputs: int
    num_outputs: int
    weights: int  # address
    bias: int  # of floats, num_outputs rounded up to whole panels


class Rows(NamedTuple):
    """Rows of floats: the address of the first, and the bytes from one to the next."""

    address: int
    stride: int


class ProjectionArgs(NamedTuple):
    """What a product begins and ends with."""

    num_rows: int
    gain: int  # address of num_inputs floats; 0: no norm before
    gate: int
    eps: float
    streams: bool  # the results past the caches
    adds: bool  # the results to the residual stream
    after_gain: int  # address of num_outputs floats; 0: no norm before they are added
    after_eps: float
    packed: int  # memory for packed rows, `packed_bytes`


def matrix_of(fmt: Format, num_inputs: int, num_outputs: int, weights: int, bias: int) -> Matrix:
    sizes = (fmt.group, fmt.panel, fmt.row_group, fmt.weight_group)
    return Matrix(fmt is W8, *sizes, num_inputs, num_outputs, weights, bias)


def packed_bytes(fmt: Format, num_rows: int, num_inputs: int) -> int:
    """Memory for packed rows."""
    return num_rows * -(-num_inputs // fmt.group) * fmt.row_group


def weights_bytes(fmt: Format, num_inputs: int, num_outputs: int) -> int:
    """Memory of a packed matrix."""
    return -(-num_outputs // fmt.panel) * -(-num_inputs // fmt.group) * fmt.weight_group


class _Context(NamedTuple):
    """What the threads at a product share."""

    phase: int
    matrix: Matrix
    args: ProjectionArgs
    x: Rows
    out: Rows
    residual: Rows
    tiles: Any  # [tiles, 2]
    blocks: Any  # [blocks + 1]
    counter: Any  # [1]: the next item to take
    floats: Any  # [workers, ..]: memory of each
    workers: int


_PACK, _MULTIPLY, _ADD = range(3)
_INTEGERS, _LINES = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
_ROWS = tuple_type(Rows)
_share, _get = sharing(
    tuple_type(
        _Context,
        matrix=tuple_type(Matrix),
        args=tuple_type(ProjectionArgs),
        x=_ROWS,
        out=_ROWS,
        residual=_ROWS,
        tiles=_LINES,
        blocks=_INTEGERS,
        counter=_INTEGERS,
        floats=types.Array(types.float32, 2, "C"),
    )
)


def project_kernel() -> Kernel:
    """project(threads, matrix, args, x, out, residual)"""
    version = source_version()

    @_compiled(nogil=True)
    def project(
        threads: PoolHandle,
        work: int,
        matrix: Matrix,
        args: ProjectionArgs,
        x: Rows,
        out: Rows,
        residual: Rows,
    ) -> int:
        tiles = _cut_rows(args.num_rows, _SIZES_W8 if matrix.is_small else _SIZES_W16)
        blocks = _cut_tiles(tiles, _num_groups(matrix) * matrix.row_group)
        counter = np.zeros(1, np.int64)
        some = threads if args.num_rows * matrix.num_inputs > _LITTLE else PoolHandle(threads.state, 1)
        prepared = np.zeros((some.workers, _num_groups(matrix) * matrix.group), np.float32)
        sums = np.empty((threads.workers, 2 * _MOST_ROWS * matrix.panel + VECTOR_BYTES), np.float32)
        n = threads.workers
        c = (matrix, args, x, out, residual, tiles, blocks, counter)
        _share(some, work, _Context(_PACK, *c, prepared, n))
        counter[0] = 0
        _share(threads, work, _Context(_MULTIPLY, *c, sums, n))
        if args.adds:
            counter[0] = 0
            _share(some, work, _Context(_ADD, *c, sums, n))
        return version

    def work(address: int, worker: int) -> None:
        _work(_get(address), worker, version)

    return Kernel(project, work)


@_compiled
def _work(c: _Context, worker: int, _version: int) -> None:
    if c.phase == _PACK:
        _pack_tiles(c, c.floats[worker])
    elif c.phase == _MULTIPLY:
        _multiply(c, c.floats[worker])
    else:
        _add_rows(c)


@_compiled
def _num_groups(matrix: Matrix) -> int:
    return -(-matrix.num_inputs // matrix.group)


@_compiled
def _cut_rows(num_rows: int, sizes: Any) -> Any:
    """[tiles, 2]: first row and how many, the largest tiles first."""
    tiles = np.empty((num_rows, 2), np.int64)
    row = count = 0
    for size in sizes:
        while num_rows - row >= size:
            tiles[count, 0], tiles[count, 1] = row, size
            row += size
            count += 1
    return tiles[:count]


@_compiled
def _cut_tiles(tiles: Any, row_bytes: int) -> Any:
    """Which tile each block begins with, and the end."""
    starts = np.empty(len(tiles) + 1, np.int64)
    count = size = 0
    for i in range(len(tiles)):
        more = tiles[i, 1] * row_bytes
        if i == 0 or size + more > _BLOCK_BYTES:
            starts[count] = i
            count += 1
            size = 0
        size += more
    starts[count] = len(tiles)
    return starts[: count + 1]


@_compiled
def _pack_tiles(c: _Context, scratch: Any) -> None:
    matrix, args, x, tiles = c.matrix, c.args, c.x, c.tiles
    num_groups = _num_groups(matrix)
    memory = np.int64(scratch.ctypes.data)  # an unsigned one beside a signed one would become a float
    while True:
        number = next_number(c.counter.ctypes.data)
        if number >= len(tiles):
            break
        first, rows = tiles[number]
        tile = args.packed + first * num_groups * matrix.row_group
        for row in range(rows):
            ready = _prepare(matrix, args, x.address + (first + row) * x.stride, memory)
            for i in range(num_groups):
                to, source = tile + i * rows * matrix.row_group, ready + i * matrix.group * 4
                if matrix.is_small:
                    vector.pack_row_w8(to, row, rows, source)
                else:
                    vector.pack_row_w16(to, row, rows, source)


@_compiled
def _prepare(matrix: Matrix, args: ProjectionArgs, row: int, scratch: int) -> int:
    """The address of a row that is ready to be packed; in `scratch` zeros follow it up to a whole group."""
    if args.gain:
        row_vector.norm(scratch, row, matrix.num_inputs, args.gain, args.eps)
    elif matrix.num_inputs % matrix.group:
        copy(scratch, row, matrix.num_inputs * 4)
    else:
        return row
    return scratch


@_compiled
def _multiply(c: _Context, memory: Any) -> None:
    matrix, args, out, tiles, blocks = c.matrix, c.args, c.out, c.tiles, c.blocks
    num_panels = -(-matrix.num_outputs // matrix.panel) // (2 if args.gate else 1)
    step = max(1, min(_PANELS, num_panels // (4 * c.workers)))
    num_steps = -(-num_panels // step)
    sums = -(-np.int64(memory.ctypes.data) // VECTOR_BYTES) * VECTOR_BYTES
    while True:
        number = next_number(c.counter.ctypes.data)
        if number >= num_steps * (len(blocks) - 1):
            break
        block, first = number // num_steps, number % num_steps * step
        for panel in range(first, min(first + step, num_panels)):
            for tile in tiles[blocks[block] : blocks[block + 1]]:
                to = out.address + tile[0] * out.stride + panel * matrix.panel * 4
                if args.gate:
                    _multiply_gated(matrix, args, Rows(to, out.stride), tile[0], tile[1], panel, sums)
                else:
                    width = min(matrix.panel, matrix.num_outputs - panel * matrix.panel)
                    _multiply_tile(matrix, args, tile[0], tile[1], panel, sums)
                    for row in range(tile[1]):
                        place, source = to + row * out.stride, sums + row * matrix.panel * 4
                        if args.streams and width == matrix.panel:
                            row_vector.stream(place, source, width)
                        else:
                            row_vector.move(place, source, width)


@_compiled
def _multiply_tile(
    matrix: Matrix, args: ProjectionArgs, first: int, rows: int, panel: int, sums: int
) -> None:
    num_groups = _num_groups(matrix)
    tile = args.packed + first * num_groups * matrix.row_group
    weights = matrix.weights + panel * num_groups * matrix.weight_group
    size = matrix.panel * 4
    for row in range(rows):
        copy(sums + row * size, matrix.bias + panel * size, size)
    if matrix.is_small:
        vector.multiply_w8(rows, sums, tile, weights, num_groups)
    else:
        vector.multiply_w16(rows, sums, tile, weights, num_groups)


@_compiled
def _multiply_gated(
    matrix: Matrix, args: ProjectionArgs, out: Rows, first: int, rows: int, panel: int, sums: int
) -> None:
    size = matrix.panel * 4
    gated = sums + rows * size
    _multiply_tile(matrix, args, first, rows, 2 * panel, sums)
    _multiply_tile(matrix, args, first, rows, 2 * panel + 1, gated)
    for row in range(rows):
        to, gate, other = out.address + row * out.stride, sums + row * size, gated + row * size
        if args.gate == SILU:
            row_vector.gate_silu(to, gate, other, matrix.panel)
        else:
            row_vector.gate_gelu_tanh(to, gate, other, matrix.panel)


@_compiled
def _add_rows(c: _Context) -> None:
    args, out, residual = c.args, c.out, c.residual
    width = c.matrix.num_outputs // (2 if args.gate else 1)
    while True:
        first = next_number(c.counter.ctypes.data) * _ADDED
        if first >= args.num_rows:
            break
        for row in range(first, min(first + _ADDED, args.num_rows)):
            to, more = residual.address + row * residual.stride, out.address + row * out.stride
            if args.after_gain:
                row_vector.add_norm(to, more, width, args.after_gain, args.after_eps)
            else:
                row_vector.add(to, more, width)


class _Packing(NamedTuple):
    """What the threads that pack a matrix share."""

    matrix: Matrix
    rows: Rows
    first: int
    num_rows: int
    counter: Any  # [1]


_share_packing, _get_packing = sharing(
    tuple_type(_Packing, matrix=tuple_type(Matrix), rows=_ROWS, counter=_INTEGERS)
)


def pack_kernel() -> Kernel:
    """pack(threads, matrix, rows, first, num_rows): rows of a matrix, from row `first` on, a panel's start.

    `rows` begins with row `first`.
    """
    version = source_version()

    @_compiled(nogil=True)
    def pack(threads: PoolHandle, work: int, matrix: Matrix, rows: Rows, first: int, num_rows: int) -> int:
        counter = np.zeros(1, np.int64)
        _share_packing(threads, work, _Packing(matrix, rows, first, num_rows, counter))
        return version

    def work(address: int, worker: int) -> None:  # noqa: ARG001
        _pack_panels(_get_packing(address), version)

    return Kernel(pack, work)


@_compiled
def _pack_panels(c: _Packing, _version: int) -> None:
    while True:
        panel = next_number(c.counter.ctypes.data)
        if panel * c.matrix.panel >= c.num_rows:
            break
        _pack_panel(c.matrix, c.rows, c.first // c.matrix.panel, panel, c.num_rows)


@_compiled
def _pack_panel(matrix: Matrix, rows: Rows, first_panel: int, panel: int, num_rows: int) -> None:
    num_groups = _num_groups(matrix)
    scratch = np.zeros(num_groups * matrix.group, np.float32)
    to = matrix.weights + (first_panel + panel) * num_groups * matrix.weight_group
    for output in range(matrix.panel):
        row = panel * matrix.panel + output
        if row < num_rows:
            copy(scratch.ctypes.data, rows.address + row * rows.stride, matrix.num_inputs * 4)
        else:
            scratch[:] = 0
        for i in range(num_groups):
            place, source = to + i * matrix.weight_group, scratch.ctypes.data + i * matrix.group * 4
            if matrix.is_small:
                vector.pack_weights_w8(place, output, source)
            else:
                vector.pack_weights_w16(place, output, source)


def read_kernel() -> Kernel:
    """read(threads, matrix, numbers, out, factor): rows of a packed matrix as floats, times a factor."""
    version = source_version()

    @_compiled(nogil=True)
    def read(_threads: PoolHandle, _work: int, matrix: Matrix, numbers: Any, out: Rows, factor: float) -> int:
        num_groups = _num_groups(matrix)
        scratch = np.empty(num_groups * matrix.group, np.float32)
        for row in range(len(numbers)):
            panel, output = numbers[row] // matrix.panel, numbers[row] % matrix.panel
            for i in range(num_groups):
                place = matrix.weights + (panel * num_groups + i) * matrix.weight_group
                to = scratch.ctypes.data + i * matrix.group * 4
                if matrix.is_small:
                    vector.read_weights_w8(to, output, place)
                else:
                    vector.read_weights_w16(to, output, place)
            row_vector.scale(out.address + row * out.stride, scratch.ctypes.data, matrix.num_inputs, factor)
        return version

    return Kernel(read, None)
