"""The arithmetic of attention, as vector code. Knows addresses only.

What makes a row's bits independent of everything beside it:

- in the scores a lane of a vector is one query row, in the output it is one element of a value: no sum runs
  across lanes;
- a score is one chain of fused multiply-adds over the head's elements, first to last; sums over positions run
  from the first to the last too, and a position that a row does not see changes no bit of them.

A tile has up to TILE_ROWS query rows. Its scores and weights lie as [group of LANES rows][position][lane],
its queries as [group][element][lane], or [four rows][element][row] if they are FEW. A
state is the result of some positions: the maximum score of each row,
its sum of weights 2^(score - maximum), and its weighted sum of values, as [TILE_ROWS], [TILE_ROWS], [rows][D]
floats. All addresses, strides and sizes are in bytes, except D (`dim`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir

from legato.kernels.vector import (
    FLOAT,
    FLOATS,
    HALVES,
    INT,
    INT64,
    INTS,
    LANES,
    SHORTS,
    VECTOR_BYTES,
    Value,
    exp2,
    has_wide_registers,
    intrinsic_from,
    tanh,
)

TILE_ROWS = 64
SUMS = 4 * TILE_ROWS
"""From a state's maxima to its sums of weights, and from the old to the new factors of a merge."""

AHEAD = 16
"""How many keys or values ahead memory is fetched: without it decodes wait for memory half of the time."""

FEW = 8 if has_wide_registers() else 0
"""A tile of so few rows, as a decode's, is scored four rows at a time: its bits are the same, but else most
lanes would be empty."""
FOUR = 4

FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""What keys and values are stored as."""
_SIZES = (4, 2, 2)

_LOWEST = float(np.finfo(np.float32).min)


def _load(element: int, at: Value) -> Value:
    """LANES elements of a key or value."""
    if element == FLOAT32:
        return at.load()
    if element == FLOAT16:
        return at.load(HALVES).cast("fpext", FLOATS)
    return (at.load(SHORTS).cast("zext", INTS) << 16).bitcast(FLOATS)


def _for_each_element(element: Value, body: Callable[[int], None]) -> None:
    """Code for each kind of element, chosen when it runs."""
    element.switch({kind: partial(body, kind) for kind in (FLOAT32, BFLOAT16, FLOAT16)})


@intrinsic_from
def widen(to: Value, source: Value, dim: Value, element: Value) -> None:
    """A key or value as float32."""
    _for_each_element(
        element,
        lambda kind: dim.for_each(
            LANES, lambda d: (to + d * 4).store(_load(kind, source + d * _SIZES[kind]))
        ),
    )


@intrinsic_from
def pack_query(lane: Value, stride: Value, query: Value, dim: Value, factor: Value) -> None:
    """One lane of a group's queries = factor * query."""
    dim.for_each(1, lambda d: (lane + d * stride).store((query + d * 4).load(FLOAT) * factor))


@intrinsic_from
def clear(address: Value, size: Value) -> None:
    """Zeros in `size` bytes, a multiple of VECTOR_BYTES."""
    size.for_each(VECTOR_BYTES, lambda i: (address + i).store(i.floats(0.0)))


@intrinsic_from
def reset_state(state: Value, size: Value) -> None:
    """The state of no positions, `size` bytes."""
    size.like(0).range_loop(size.like(SUMS), VECTOR_BYTES, lambda i: (state + i).store(i.floats(_LOWEST)))
    size.like(SUMS).range_loop(size, VECTOR_BYTES, lambda i: (state + i).store(i.floats(0.0)))


@intrinsic_from
def score(scores: Value, queries: Value, addresses: Value, count: Value, dim: Value) -> None:
    """scores [count][lane] = keys at `addresses` [count] times queries [D][lane]; count a multiple of 8.

    Keys are float32.
    """
    num_keys = 8 if has_wide_registers() else 4

    def some_keys(first: Value) -> None:
        rows = [(addresses + first * 8 + 8 * i).load(INT64) for i in range(num_keys)]
        ahead = [(addresses + first * 8 + 8 * (i + AHEAD)).load(INT64) for i in range(num_keys)]

        def add(d: Value, *sums: Value) -> list[Value]:
            new = list(sums)
            for row in ahead:
                (row + d * 4).prefetch()
            for i in range(LANES):
                query = (queries + d * VECTOR_BYTES + i * VECTOR_BYTES).load()
                keys = [(row + d * 4 + i * 4).load(FLOAT).splat() for row in rows]
                new = [query.fma(key, total) for key, total in zip(keys, new, strict=True)]
            return new

        sums = first.like(0).range_loop(dim, LANES, add, *[first.floats(0.0)] * num_keys)
        for i, total in enumerate(sums):
            (scores + first * VECTOR_BYTES + i * VECTOR_BYTES).store(total)

    count.for_each(num_keys, some_keys)


@intrinsic_from
def score_few(
    scores: Value, queries: Value, addresses: Value, count: Value, dim: Value, element: Value
) -> None:
    """scores [count][lane] of four lanes, for queries [D][FOUR]; count a multiple of 16.

    A lane of a vector is a row and one of four keys, so that all are of use.
    """
    sets, block = range(4), range(4)

    def some_keys(kind: int, first: Value) -> None:
        def add(d: Value, *sums: Value) -> list[Value]:
            new = list(sums)
            keys = [_four_keys(kind, addresses + first * 8 + 32 * s, d) for s in sets]
            for i in range(LANES):
                four = (queries + d * (4 * FOUR) + i * (4 * FOUR)).load(ir.VectorType(FLOAT, FOUR))
                query = four.lanes(*[0, 1, 2, 3] * 4)
                for s in sets:
                    key = keys[s][i // 4].lanes(*[4 * b + i % 4 for b in block for _ in range(4)])
                    new[s] = query.fma(key, new[s])
            return new

        sums = first.like(0).range_loop(dim, LANES, add, *[first.floats(0.0)] * 4)
        for s, total in enumerate(sums):
            for b in block:
                to = scores + first * VECTOR_BYTES + (4 * s + b) * VECTOR_BYTES
                to.store(total.lanes(*range(4 * b, 4 * b + 4)))

    _for_each_element(element, lambda kind: count.for_each(16, lambda first: some_keys(kind, first)))


def _four_keys(kind: int, addresses: Value, d: Value) -> list[Value]:
    """Four vectors: the i-th holds elements d + 4 i .. d + 4 i + 3 of each of four keys in turn."""
    rows = [(addresses + 8 * b).load(INT64) for b in range(4)]
    for b in range(4):
        ((addresses + 8 * (b + AHEAD)).load(INT64) + d * _SIZES[kind]).prefetch()
    keys = [_load(kind, row + d * _SIZES[kind]) for row in rows]
    halves = [(_blocks(keys[0], keys[1], i, i + 1), _blocks(keys[2], keys[3], i, i + 1)) for i in (0, 2)]
    return [_blocks(*halves[i // 2], i % 2, i % 2 + 2) for i in range(4)]


def _blocks(one: Value, other: Value, first: int, second: int) -> Value:
    """Two blocks of four lanes of one vector, then the same of another."""
    both = one.concat(other)
    starts = (4 * first, 4 * second, LANES + 4 * first, LANES + 4 * second)
    return both.lanes(*[start + i for start in starts for i in range(4)])


@intrinsic_from
def cap_scores(scores: Value, count: Value, cap: Value) -> None:
    """Scores of 2 x log2(e) become cap * tanh(x)."""

    def bend(j: Value) -> None:
        at = scores + j * VECTOR_BYTES
        at.store(tanh(at.load()) * cap.splat())

    count.for_each(1, bend)


@intrinsic_from
def weigh(scores: Value, count: Value, first: Value, seen: Value, state: Value, factors: Value) -> None:
    """Scores of `count` positions from `first` on become weights, and are merged into a group's state.

    `seen`: the first position that each row sees, int32 [TILE_ROWS], and then the ends. What a row does not
    see has the weight -0.
    """
    begin, end = seen.load(INTS), (seen + SUMS).load(INTS)

    def mask(j: Value, highest: Value) -> list[Value]:
        at, position = scores + j * VECTOR_BYTES, (first + j).cast("trunc", INT).splat()
        value = at.load().select((begin - 1 < position) & (position < end), float("-inf"))
        at.store(value)
        return [value.select(highest < value, highest)]

    def exponentiate(j: Value, total: Value) -> list[Value]:
        at, value = scores + j * VECTOR_BYTES, (scores + j * VECTOR_BYTES).load()
        weight = exp2(value - highest)
        at.store(weight.floats(-0.0).select(value < _LOWEST, weight))
        return [total + weight]

    (highest,) = first.like(0).range_loop(count, 1, mask, first.floats(_LOWEST))
    (total,) = first.like(0).range_loop(count, 1, exponentiate, first.floats(0.0))
    _merge(state, highest, total, factors)


def _merge(state: Value, highest: Value, total: Value, factors: Value) -> None:
    """A group's maxima and sums take in those of later positions; leaves factors for the sums of values."""
    top = highest.select(state.load() < highest, state.load())
    old, new = exp2(state.load() - top), exp2(highest - top)
    factors.store(old)
    (factors + SUMS).store(new)
    state.store(top)
    (state + SUMS).store(total.fma(new, (state + SUMS).load() * old))


@intrinsic_from
def merge_group(state: Value, later: Value, factors: Value) -> None:
    _merge(state, later.load(), (later + SUMS).load(), factors)


def _factors_of(factors: Value) -> tuple[Value, Value]:
    return factors.load(FLOAT).splat(), (factors + SUMS).load(FLOAT).splat()


@intrinsic_from
def merge_row(values: Value, later: Value, dim: Value, factors: Value) -> None:
    """One row's sum of values takes in that of later positions."""
    old, new = _factors_of(factors)

    def merge(d: Value) -> None:
        at = values + d * 4
        at.store((later + d * 4).load().fma(new, at.load() * old))

    dim.for_each(LANES, merge)


def _add_values(is_edge: bool) -> Any:
    width = 4 if has_wide_registers() else 1

    @intrinsic_from
    def add_values(
        sums: Value,
        weights: Value,
        addresses: Value,
        count: Value,
        dim: Value,
        factors: Value,
        element: Value,
    ) -> None:
        """Four rows' sums take in the values at `addresses` [count], weighted by weights [count][lane]."""

        def columns(kind: int, width: int, d: Value) -> None:
            def add(j: Value, *totals: Value) -> list[Value]:
                value = (addresses + j * 8).load(INT64) + d * _SIZES[kind]
                parts = [_load(kind, value + i * LANES * _SIZES[kind]) for i in range(width)]
                ahead = (addresses + j * 8 + 8 * AHEAD).load(INT64) + d * _SIZES[kind]
                for i in range(0, width * LANES * _SIZES[kind], VECTOR_BYTES):
                    (ahead + i).prefetch()
                new = []
                for row in range(4):
                    weight = (weights + j * VECTOR_BYTES + row * 4).load(FLOAT).splat()
                    for part, total in zip(parts, totals[row * width :], strict=False):
                        more = part.fma(weight, total)
                        # Even -0 times a value is not nothing if the value is infinite or NaN.
                        bits = weight.bitcast(INTS)
                        new.append(total.select(bits < 0, more) if is_edge else more)
                return new

            totals = d.like(0).range_loop(count, 1, add, *[d.floats(0.0)] * (4 * width))
            for row in range(4):
                old, new = _factors_of(factors + row * 4)
                for i in range(width):
                    at = sums + dim * (4 * row) + d * 4 + i * VECTOR_BYTES
                    at.store(totals[row * width + i].fma(new, at.load() * old))

        def all_columns(kind: int) -> None:
            whole = dim & -(LANES * width)
            whole.for_each(LANES * width, lambda d: columns(kind, width, d))
            whole.range_loop(dim, LANES, lambda d: columns(kind, 1, d))

        _for_each_element(element, all_columns)

    return add_values


add_values, add_values_at_edge = _add_values(False), _add_values(True)
"""The same where each row sees all positions; the second also where some do not."""


@intrinsic_from
def finish(out: Value, values: Value, total: Value, dim: Value) -> None:
    """A row of the output. Adding 0 makes -0 positive: which zero it is would depend on the tile."""
    dim.for_each(
        LANES, lambda d: (out + d * 4).store((values + d * 4).load() / total.load(FLOAT).splat() + 0.0)
    )
