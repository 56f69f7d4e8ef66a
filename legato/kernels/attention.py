"""One layer's attention of a mixed step, shared by threads. Compiled by numba; knows addresses, no tensors.

Work is cut by query rows and by positions. A tile is up to TILE_ROWS flat rows of one sequence and key-value
head; flat row f is query head f % R of the sequence's row f // R, with R query heads on one key-value head.
Positions are cut into parts of PART absolute positions. Each part of a tile is computed by itself, and the
parts are merged first to last: all by one thread, or, if the tile is a large share of the step, by several.
With the arithmetic of `attention_vector.py`, no bit of a row's result depends on who computes a part, on the
other rows of the tile, or on positions that the row does not see.

Shape legend: see `attention/base.py`.
"""

# numba's types describe only some of its uses.
# mypy: disallow-untyped-decorators=False, warn-return-any=False

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from legato.kernels import attention_vector as vector
from legato.kernels.attention_vector import AHEAD, FEW, FLOAT32, FOUR, SUMS, TILE_ROWS
from legato.kernels.cache import Kernel, source_version
from legato.kernels.thread_pool import PoolHandle, sharing, tuple_type
from legato.kernels.vector import LANES, VECTOR_BYTES, copy, next_number

_compiled: Any = numba.njit

PART = 128

_TILE = np.dtype(
    [
        ("seq", np.int64),
        ("head", np.int64),  # key-value head
        ("row", np.int64),  # first flat row
        ("count", np.int64),  # flat rows
        ("low", np.int64),  # its rows see positions of low .. high - 1, in the parts first .. end - 1
        ("high", np.int64),
        ("first", np.int64),
        ("end", np.int64),
        ("state_bytes", np.int64),
        ("states", np.int64),  # if several threads compute it: which byte its first part's state begins at
    ]
)
_ITEM = np.dtype([("tile", np.int64), ("part", np.int64)])  # one thread's work: a part, or _WHOLE
_WHOLE = -1
_ITEMS_PER_WORKER = 2
_MAX_STATE_BYTES = 1 << 25
"""How much memory the states that wait to be merged may take; beyond it tiles are computed whole."""


class Rows(NamedTuple):
    """Where heads lie: the address, and the bytes from row to row and from head to head."""

    address: int
    row: int
    head: int


class Step(NamedTuple):
    """One layer of a step."""

    query_start: Any  # [S + 1] int32
    start: Any  # [S] int32
    block_table: Any  # [S, W] int32
    slots: Any  # [T] int64
    kv_heads: int
    ratio: int
    dim: int
    block_size: int
    element: int
    window: int  # longer than any context if there is none
    factor: float  # of the query before it meets a key: into units of log2, or of _tanh's argument
    cap: float  # of the scores, in units of log2; 0 for none


class _Scratch(NamedTuple):
    """One worker's memory."""

    seen: Any  # [2, TILE_ROWS] int32: the first position that each row sees, and the end
    slots: Any  # [PART] int64
    addresses: Any  # [PART + AHEAD] int64
    queries: int  # addresses of float32
    scores: int
    factors: int
    wide: int
    state: int


class _Context(NamedTuple):
    """What the threads at a step share."""

    step: Step
    q: Rows
    out: Rows
    keys: Rows
    values: Rows
    tiles: Any
    items: Any
    states: Any
    numbers: Any  # the next item, then for each tile how many of its parts are done
    scratch: Any  # [workers, ..]


_ROWS, _BYTES = tuple_type(Rows), types.Array(types.uint8, 1, "C")
_share, _get = sharing(
    tuple_type(
        _Context,
        step=tuple_type(
            Step,
            query_start=types.Array(types.int32, 1, "C"),
            start=types.Array(types.int32, 1, "C"),
            block_table=types.Array(types.int32, 2, "C"),
            slots=types.Array(types.int64, 1, "C"),
        ),
        q=_ROWS,
        out=_ROWS,
        keys=_ROWS,
        values=_ROWS,
        tiles=types.Array(numba.from_dtype(_TILE), 1, "C"),
        items=types.Array(numba.from_dtype(_ITEM), 1, "C"),
        states=_BYTES,
        numbers=types.Array(types.int64, 1, "C"),
        scratch=types.Array(types.uint8, 2, "C"),
    )
)


def attend_kernel() -> Kernel:
    """attend(threads, step, q, k, v, out, keys, values): stores a step's K and V, then attends.

    Rows of q, k, v and out are tokens, those of the pools `keys` and `values` are slots. q and out are
    float32, the others have the pools' element.
    """
    version = source_version()

    @_compiled(nogil=True)
    def attend(
        threads: PoolHandle,
        work: int,
        step: Step,
        q: Rows,
        k: Rows,
        v: Rows,
        out: Rows,
        keys: Rows,
        values: Rows,
    ) -> int:
        _store(step, k, keys)
        _store(step, v, values)
        tiles = _cut_rows(step)
        items, num_bytes = _cut_work(tiles, threads.workers)
        some = PoolHandle(threads.state, min(threads.workers, len(items)))
        states = np.empty(num_bytes + VECTOR_BYTES, np.uint8)
        numbers = np.zeros(1 + len(tiles), np.int64)
        scratch = np.empty((some.workers, _scratch_bytes(step.dim)), np.uint8)
        context = _Context(step, q, out, keys, values, tiles, items, states, numbers, scratch)
        _share(some, work, context)
        return version

    def work(address: int, worker: int) -> None:
        _work(_get(address), worker, version)

    return Kernel(attend, work)


@_compiled
def _cut_rows(step: Step) -> Any:
    num_tiles = 0
    for seq in range(len(step.start)):
        rows = (step.query_start[seq + 1] - step.query_start[seq]) * step.ratio
        num_tiles += -(-rows // TILE_ROWS) * step.kv_heads
    tiles = np.empty(num_tiles, _TILE)
    at = 0
    for seq in range(len(step.start)):
        rows = (step.query_start[seq + 1] - step.query_start[seq]) * step.ratio
        for head in range(step.kv_heads):
            for row in range(0, rows, TILE_ROWS):
                tile = tiles[at]
                at += 1
                tile.seq, tile.head, tile.row, tile.count = seq, head, row, min(TILE_ROWS, rows - row)
                tile.low = max(0, step.start[seq] + row // step.ratio - step.window + 1)
                tile.high = step.start[seq] + (row + tile.count - 1) // step.ratio + 1
                tile.first, tile.end = tile.low // PART, (tile.high - 1) // PART + 1
                tile.state_bytes = 2 * SUMS + _up(tile.count, 4) * step.dim * 4
                tile.states = -1
    return tiles


@_compiled
def _up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit


@_compiled
def _cost(tile: Any) -> int:
    return (tile.high - tile.low) * _up(tile.count, LANES)


@_compiled
def _cut_work(tiles: Any, workers: int) -> Any:
    """Items, and the bytes of states. Costly items come first, so that workers end at about the same time."""
    total = 0
    for tile in tiles:
        total += _cost(tile)
    num_items = num_bytes = 0
    for tile in tiles:
        parts = tile.end - tile.first
        is_large = _cost(tile) * workers * _ITEMS_PER_WORKER > total
        fits = num_bytes + parts * tile.state_bytes <= _MAX_STATE_BYTES
        if workers > 1 and parts > 1 and is_large and fits:
            tile.states = num_bytes
            num_bytes += parts * tile.state_bytes
            num_items += parts
        else:
            num_items += 1
    items = np.empty(num_items, _ITEM)
    at = 0
    for index in range(len(tiles) - 1, -1, -1):  # later tiles of a sequence see more
        if tiles[index].states < 0:
            items[at].tile, items[at].part = index, _WHOLE
            at += 1
    for index in range(len(tiles)):
        if tiles[index].states >= 0:
            for part in range(tiles[index].first, tiles[index].end):
                items[at].tile, items[at].part = index, part
                at += 1
    return items, num_bytes


@_compiled
def _store(step: Step, new: Rows, pool: Rows) -> None:
    size = step.dim * (4 if step.element == FLOAT32 else 2)
    for row in range(len(step.slots)):
        for head in range(step.kv_heads):
            to = pool.address + step.slots[row] * pool.row + head * pool.head
            copy(to, new.address + row * new.row + head * new.head, size)


@_compiled
def _work(c: _Context, worker: int, _version: int) -> None:
    """Take items until there are none."""
    step, q, out, keys, values = c.step, c.q, c.out, c.keys, c.values
    tiles, items, states, numbers = c.tiles, c.items, c.states, c.numbers
    memory = c.scratch[worker]
    scratch = _cut_scratch(memory, step.dim)
    shared = _up(states.ctypes.data, VECTOR_BYTES)
    while True:
        number = next_number(numbers.ctypes.data)
        if number >= len(items):
            break
        item = items[number]
        tile = tiles[item.tile]
        _prepare(step, q, tile, scratch)
        if item.part == _WHOLE:
            vector.reset_state(scratch.state, tile.state_bytes)
            for part in range(tile.first, tile.end):
                _attend_part(step, keys, values, tile, part, scratch.state, scratch)
            _write(step, out, tile, scratch.state)
        else:
            first = shared + tile.states
            state = first + (item.part - tile.first) * tile.state_bytes
            vector.reset_state(state, tile.state_bytes)
            _attend_part(step, keys, values, tile, item.part, state, scratch)
            done = next_number(numbers.ctypes.data + 8 * (1 + item.tile)) + 1
            if done == tile.end - tile.first:
                _merge_parts(step, tile, first, scratch.factors)
                _write(step, out, tile, first)


@_compiled
def _scratch_bytes(dim: int) -> int:
    return 4 * (2 * TILE_ROWS * dim + TILE_ROWS * PART + PART * dim) + 4 * SUMS + VECTOR_BYTES


@_compiled
def _cut_scratch(memory: Any, dim: int) -> _Scratch:
    queries = _up(memory.ctypes.data, VECTOR_BYTES)
    scores = queries + 4 * TILE_ROWS * dim
    factors = scores + 4 * TILE_ROWS * PART
    wide = factors + 2 * SUMS
    state = wide + 4 * PART * dim
    seen, slots = np.empty((2, TILE_ROWS), np.int32), np.empty(PART, np.int64)
    addresses = np.empty(PART + AHEAD, np.int64)
    return _Scratch(seen, slots, addresses, queries, scores, factors, wide, state)


@_compiled
def _head_of(step: Step, rows: Rows, tile: Any, flat: int) -> int:
    """The address of a flat row's head in q or out."""
    token = step.query_start[tile.seq] + flat // step.ratio
    return rows.address + token * rows.row + (tile.head * step.ratio + flat % step.ratio) * rows.head


@_compiled
def _prepare(step: Step, q: Rows, tile: Any, scratch: _Scratch) -> None:
    """Lay out the tile's queries, and what each of its rows sees; spare lanes are zeros and see nothing."""
    scratch.seen[:] = 0
    lanes = FOUR if tile.count <= FEW else LANES
    vector.clear(scratch.queries, _up(tile.count, lanes) * step.dim * 4)
    for i in range(tile.count):
        position = step.start[tile.seq] + (tile.row + i) // step.ratio
        scratch.seen[0, i], scratch.seen[1, i] = max(0, position - step.window + 1), position + 1
        lane = scratch.queries + i // lanes * step.dim * lanes * 4 + i % lanes * 4
        vector.pack_query(lane, lanes * 4, _head_of(step, q, tile, tile.row + i), step.dim, step.factor)


@_compiled
def _attend_part(
    step: Step, keys: Rows, values: Rows, tile: Any, part: int, state: int, scratch: _Scratch
) -> None:
    """Merge a part of the positions into the state."""
    dim = step.dim
    first = max(part * PART, tile.low)
    count = min((part + 1) * PART, tile.high) - first
    addresses = scratch.addresses.ctypes.data
    _find(scratch.slots, step.block_table[tile.seq], step.block_size, first, count)
    element = _fetch(step, keys, tile, count, scratch)
    if tile.count <= FEW:
        for row in range(0, tile.count, FOUR):
            scores, queries = scratch.scores + row * 4, scratch.queries + row * dim * 4
            vector.score_few(scores, queries, addresses, _up(count, 16), dim, element)
    for row in range(0, tile.count, LANES):
        scores, at = scratch.scores + row * PART * 4, row * 4
        if tile.count > FEW:
            vector.score(scores, scratch.queries + row * dim * 4, addresses, _up(count, 8), dim)
        if step.cap > 0:
            vector.cap_scores(scores, count, step.cap)
        vector.weigh(scores, count, first, scratch.seen.ctypes.data + at, state + at, scratch.factors + at)
    element = _fetch(step, values, tile, count, scratch)
    is_edge = first < scratch.seen[0, tile.count - 1] or first + count > scratch.seen[1, 0]
    for row in range(0, tile.count, 4):
        sums, factors = state + 2 * SUMS + row * dim * 4, scratch.factors + row * 4
        weights = scratch.scores + row // LANES * PART * VECTOR_BYTES + row % LANES * 4
        if is_edge:
            vector.add_values_at_edge(sums, weights, addresses, count, dim, factors, element)
        else:
            vector.add_values(sums, weights, addresses, count, dim, factors, element)


@_compiled
def _find(slots: Any, blocks: Any, block_size: int, first: int, count: int) -> None:
    """The slots of `count` positions from `first` on."""
    block, offset = first // block_size, first % block_size
    for j in range(count):
        slots[j] = blocks[block] * block_size + offset
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0


@_compiled
def _fetch(step: Step, pool: Rows, tile: Any, count: int, scratch: _Scratch) -> int:
    """Where the part's keys or values are, and what they are.

    In the pool; but if many rows need them as float32, they are widened once, in `scratch.wide`. The last
    address is repeated to the end, for keys are scored several at a time and memory is fetched ahead.
    """
    widens = step.element != FLOAT32 and tile.count > FEW
    for j in range(count):
        row = pool.address + scratch.slots[j] * pool.row + tile.head * pool.head
        if widens:
            wide = scratch.wide + j * step.dim * 4
            vector.widen(wide, row, step.dim, step.element)
            row = wide
        scratch.addresses[j] = row
    scratch.addresses[count:] = scratch.addresses[count - 1]
    return FLOAT32 if widens else step.element


@_compiled
def _merge_parts(step: Step, tile: Any, first: int, factors: int) -> None:
    """The states of all parts into that of the first."""
    for part in range(1, tile.end - tile.first):
        later = first + part * tile.state_bytes
        for row in range(0, tile.count, LANES):
            vector.merge_group(first + row * 4, later + row * 4, factors + row * 4)
        for row in range(tile.count):
            at = 2 * SUMS + row * step.dim * 4
            vector.merge_row(first + at, later + at, step.dim, factors + row * 4)


@_compiled
def _write(step: Step, out: Rows, tile: Any, state: int) -> None:
    for i in range(tile.count):
        row = _head_of(step, out, tile, tile.row + i)
        vector.finish(row, state + 2 * SUMS + i * step.dim * 4, state + SUMS + i * 4, step.dim)
