"""Cuts a step's attention into work for threads. Compiled by numba; knows counts, no tensors.

A tile is up to `tile_rows` flat rows of one sequence and key-value head; flat row f is query head f % R of the
sequence's row f // R, with R query heads on one key-value head. A tile is one item of work unless it is a large
share of the step: then each of its parts (runs of absolute positions) is one, and their results are merged. How
the work is cut changes no bit of the output (`cpu_kernel.py` says why), so it may depend on the number of threads.
"""

# mypy: disallow-untyped-decorators=False

from typing import Any, NamedTuple

import numpy as np
from numba import njit

TILE = np.dtype(
    [
        ("seq", np.int64),
        ("token", np.int64),  # the row of the step where the sequence begins
        ("start", np.int64),  # that row's absolute position
        ("head", np.int64),  # key-value head
        ("row", np.int64),  # first flat row
        ("count", np.int64),  # flat rows
        ("low", np.int64),  # some row sees the positions low .. high - 1, in the parts first .. end - 1
        ("high", np.int64),
        ("first", np.int64),
        ("end", np.int64),
        ("state", np.int64),  # floats of one part's result
        ("states", np.int64),  # which float the first part's result begins at; -1 if the tile is one item
    ]
)
ITEM = np.dtype([("tile", np.int64), ("part", np.int64)])
WHOLE = -1
"""The `part` of an item that is a whole tile."""

_LANES = 16
_ITEMS_PER_WORKER = 4
_MAX_STATES = 1 << 23
"""At most this many floats (32 MiB) of results wait to be merged."""


class Shape(NamedTuple):
    """Of heads, tiles and team."""

    kv_heads: int
    ratio: int
    dim: int
    tile_rows: int
    part: int
    workers: int


@njit(nogil=True)
def cut(query_start: Any, start: Any, window: int, shape: Shape) -> Any:
    """TILE [..], ITEM [..] in the order of work, and the floats of all states.

    query_start [S + 1] and start [S] as in `AttentionBatch`; `window` is at least the longest context if there
    is none.
    """
    tiles = _tiles(query_start, start, window, shape)
    total = 0
    for tile in tiles:
        total += _cost(tile)
    num_items = num_floats = 0
    for tile in tiles:
        num_parts = tile.end - tile.first
        floats = num_parts * tile.state
        large = _cost(tile) * shape.workers * _ITEMS_PER_WORKER > total
        if large and shape.workers > 1 and num_parts > 1 and num_floats + floats <= _MAX_STATES:
            tile.states = num_floats
            num_floats += floats
            num_items += num_parts
        else:
            num_items += 1
    return tiles, _items(tiles, num_items), num_floats


@njit
def _tiles(query_start: Any, start: Any, window: int, shape: Shape) -> Any:
    num_tiles = 0
    for seq in range(len(start)):
        rows = (query_start[seq + 1] - query_start[seq]) * shape.ratio
        num_tiles += -(-rows // shape.tile_rows) * shape.kv_heads
    tiles = np.empty(num_tiles, TILE)
    at = 0
    for seq in range(len(start)):
        rows = (query_start[seq + 1] - query_start[seq]) * shape.ratio
        for head in range(shape.kv_heads):
            for row in range(0, rows, shape.tile_rows):
                tile = tiles[at]
                at += 1
                tile.seq, tile.token, tile.start, tile.head = seq, query_start[seq], start[seq], head
                tile.row, tile.count = row, min(shape.tile_rows, rows - row)
                tile.low = max(0, tile.start + row // shape.ratio - window + 1)
                tile.high = tile.start + (row + tile.count - 1) // shape.ratio + 1
                tile.first, tile.end = tile.low // shape.part, (tile.high - 1) // shape.part + 1
                # Maximum and sum of each row, then the rows' sums of values, in fours.
                tile.state = 2 * shape.tile_rows + (tile.count + 3) // 4 * 4 * shape.dim
                tile.states = -1
    return tiles


@njit
def _cost(tile: Any) -> int:
    """In units of one position and one vector of rows."""
    cost: int = (tile.high - tile.low) * ((tile.count + _LANES - 1) // _LANES)
    return cost


@njit
def _items(tiles: Any, num_items: int) -> Any:
    """Whole tiles first, those that see most before others of their sequence: what is left at the end is small."""
    items = np.empty(num_items, ITEM)
    at = 0
    for index in range(len(tiles) - 1, -1, -1):
        if tiles[index].states < 0:
            items[at].tile, items[at].part = index, WHOLE
            at += 1
    for index in range(len(tiles)):
        if tiles[index].states >= 0:
            for part in range(tiles[index].first, tiles[index].end):
                items[at].tile, items[at].part = index, part
                at += 1
    return items
