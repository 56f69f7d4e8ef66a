"""The arithmetic of the CPU's attention, and threads that share it. Compiled by numba; knows addresses, no tensors.

Exactness is by construction. The vector code is written out operation by operation; the compiler translates it
and has no leave to contract, reorder or vectorise sums. A lane of a vector is one query row in the scores and
one element of a value in the output, so no sum runs across lanes, and none depends on the width of the machine's
vectors, the tile or the thread:

- a score is one chain of fused multiply-adds over the head's elements, first to last;
- a sequence's positions are cut into parts of PART absolute positions; within a part the maximum, the sum of
  weights and the weighted sum of values run from its first position to its last;
- the results of parts are merged first to last, and merging an empty part changes nothing.

A position that a row does not see has the weight 0 and leaves these sums as they are. So a tile may hold any rows,
skip what none of them sees, and have its parts computed by different threads.

One file, because numba's cache on disk notices changes only in the file of the function that is cached.

Shape legend: see `attention/base.py` and `attention/cpu_plan.py`. All addresses and strides are in bytes.
"""

# mypy: disallow-untyped-decorators=False

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import llvmlite.binding as llvm
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

PART = 128
TILE_ROWS = 64
FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""Element types of a pool."""

_LANES = 16
_VECTOR, _INTS = ir.VectorType(ir.FloatType(), _LANES), ir.VectorType(ir.IntType(32), _LANES)
_SHORTS, _HALVES = ir.VectorType(ir.IntType(16), _LANES), ir.VectorType(ir.HalfType(), _LANES)
_F32, _I64 = ir.FloatType(), ir.IntType(64)
_BYTES = 4 * _LANES
_SUMS = 4 * TILE_ROWS
"""From a state's maxima to its sums, and from the one factor of a merge to the other."""
_UNROLL = 4
_LOWEST = float(np.finfo(np.float32).min)
# 2^r = 1 + r (c0 + c1 r + ..) for |r| <= 1/2: least squares, reweighted to equal ripple; error 2e-9.
_EXP2 = (0.6931471824645996, 0.24022647738456726, 0.055503323674201965)
_EXP2 += (0.00961843691766262, 0.0013398873852565885, 0.00015353361959569156)
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits


class Rows(NamedTuple):
    """Heads in memory: from row to row, from head to head; a head's elements lie side by side."""

    address: int
    row: int
    head: int


class Sizes(NamedTuple):
    """Of heads and cache."""

    kv_heads: int
    ratio: int
    dim: int
    block: int
    element: int
    """FLOAT32, BFLOAT16 or FLOAT16: what the pools hold."""


# -- vector code: what runs is what is written ---------------------------------------------------------------------


class _Value:
    """A number or vector in the code being written. Plain numbers beside it become constants of its type."""

    def __init__(self, builder: Any, code: Any) -> None:
        self.b, self.code = builder, code
        self.is_float = getattr(code.type, "element", code.type) == _F32

    def like(self, other: "_Value | float") -> "_Value":
        if isinstance(other, _Value):
            return other
        is_vector = isinstance(self.code.type, ir.VectorType)
        return _Value(self.b, ir.Constant(self.code.type, [other] * _LANES if is_vector else other))

    def _do(self, name: str, other: "_Value | float") -> "_Value":
        return _Value(self.b, getattr(self.b, name)(self.code, self.like(other).code))

    def __add__(self, other: "_Value | float") -> "_Value":
        return self._do("fadd" if self.is_float else "add", other)

    def __sub__(self, other: "_Value | float") -> "_Value":
        return self._do("fsub" if self.is_float else "sub", other)

    def __mul__(self, other: "_Value | float") -> "_Value":
        return self._do("fmul" if self.is_float else "mul", other)

    def __truediv__(self, other: "_Value") -> "_Value":
        return self._do("fdiv", other)

    def __lshift__(self, bits: int) -> "_Value":
        return self._do("shl", bits)

    def __and__(self, other: "_Value | float") -> "_Value":
        return self._do("and_", other)

    def __or__(self, other: "_Value") -> "_Value":
        return self._do("or_", other)

    def __lt__(self, other: "_Value | float") -> "_Value":
        """False where either is NaN."""
        compare = self.b.fcmp_ordered if self.is_float else self.b.icmp_signed
        return _Value(self.b, compare("<", self.code, self.like(other).code))

    def times(self, factor: "_Value", plus: "_Value | float") -> "_Value":
        """self * factor + plus, rounded once."""
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        fma = self.b.module.declare_intrinsic(f"llvm.fma.v{_LANES}f32", fnty=kind)
        return _Value(self.b, self.b.call(fma, [self.code, factor.code, self.like(plus).code]))

    def where(self, condition: "_Value", other: "_Value | float") -> "_Value":
        """self where the condition holds, else other."""
        return _Value(self.b, self.b.select(condition.code, self.code, self.like(other).code))

    def narrow(self) -> "_Value":
        return _Value(self.b, self.b.trunc(self.code, ir.IntType(32)))

    def bits(self, kind: Any) -> "_Value":
        return _Value(self.b, self.b.bitcast(self.code, kind))

    def splat(self) -> "_Value":
        """Itself in all lanes."""
        nothing = ir.Constant(ir.VectorType(self.code.type, _LANES), ir.Undefined)
        one = self.b.insert_element(nothing, self.code, ir.Constant(_I64, 0))
        return _Value(self.b, self.b.shuffle_vector(one, nothing, ir.Constant(_INTS, [0] * _LANES)))

    def load(self, kind: Any = _VECTOR) -> "_Value":
        """What is at this address."""
        return _Value(self.b, self.b.load(self.b.inttoptr(self.code, ir.PointerType()), typ=kind, align=2))

    def store(self, value: "_Value") -> None:
        self.b.store(value.code, self.b.inttoptr(self.code, ir.PointerType()), align=2)

    def upto(
        self, end: "_Value | int", step: int, body: Callable[..., Any], *values: "_Value"
    ) -> list["_Value"]:
        """for i in range(self, end, step): values = body(i, *values)"""
        b, before = self.b, self.b.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
        b.branch(head)
        b.position_at_end(head)
        starts = (self, *values)
        index, *carried = phis = [_Value(b, b.phi(value.code.type)) for value in starts]
        b.cbranch((index < end).code, inside, after)
        b.position_at_end(inside)
        new = body(index, *carried) or ()
        for phi, first, value in zip(phis, starts, (index + step, *new), strict=True):
            phi.code.add_incoming(first.code, before)
            phi.code.add_incoming(value.code, b.block)
        b.branch(head)
        b.position_at_end(after)
        return carried


def _written(write: Callable[..., None]) -> Any:
    """A function for compiled code, of integers and float32, whose code `write(*values)` writes."""

    def typed(_: Any, *given: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            write(*(_Value(builder, code) for code in cgutils.unpack_tuple(builder, arguments[0])))
            return context.get_dummy_value()

        kinds = [types.float32 if isinstance(kind, types.Float) else types.int64 for kind in given]
        return types.void(types.StarArgTuple.from_types(kinds)), generate

    return intrinsic(typed)


def _exp2_terms(t: _Value) -> tuple[_Value, _Value, _Value]:
    """n << 23, r and p, where 2^t = 2^n (1 + r p)."""
    rounded = t + _ROUND
    r = t - (rounded - _ROUND)
    p = t.like(_EXP2[-1])
    for factor in _EXP2[-2::-1]:
        p = p.times(r, factor)
    return rounded.bits(_INTS) << 23, r, p


def _exp2(t: _Value) -> _Value:
    """2^t for t <= 0, within 1 ulp; exactly 1 at 0, and 0 below -125. NaN stays NaN."""
    n, r, p = _exp2_terms(t)
    power = ((p.times(r, 1.0)).bits(_INTS) + n).bits(_VECTOR)
    return t.like(0.0).where(t < -125.0, power)


def _tanh(t: _Value) -> _Value:
    """tanh(x), given t = 2 x log2(e), as e / (e + 2) with e = 2^|t| - 1."""
    sign, size = t.bits(_INTS) & -(2**31), (t.bits(_INTS) & (2**31 - 1)).bits(_VECTOR)
    n, r, p = _exp2_terms(t.like(40.0).where(t.like(40.0) < size, size))
    whole = (n + (127 << 23)).bits(_VECTOR)
    e = whole.times(p * r, whole - 1.0)
    return ((e / (e + 2.0)).bits(_INTS) | sign).bits(_VECTOR)


def _fill_with(value: float) -> Any:
    @_written
    def fill(address: _Value, size: _Value) -> None:
        constant = _Value(address.b, ir.Constant(_VECTOR, [value] * _LANES))
        address.like(0).upto(size, _BYTES, lambda i: (address + i).store(constant))

    return fill


_clear, _lower = _fill_with(0.0), _fill_with(_LOWEST)


@_written
def _copy(to: _Value, source: _Value, size: _Value) -> None:
    """Bytes, in multiples of 32."""
    to.like(0).upto(size, 32, lambda i: (to + i).store((source + i).load(_SHORTS)))


@_written
def _widen_bfloat16(to: _Value, source: _Value, dim: _Value) -> None:
    def move(i: _Value) -> None:
        short = (source + i * 2).load(_SHORTS)
        (to + i * 4).store((_Value(short.b, short.b.zext(short.code, _INTS)) << 16).bits(_VECTOR))

    to.like(0).upto(dim, _LANES, move)


@_written
def _widen_float16(to: _Value, source: _Value, dim: _Value) -> None:
    def move(i: _Value) -> None:
        half = (source + i * 2).load(_HALVES)
        (to + i * 4).store(_Value(half.b, half.b.fpext(half.code, _VECTOR)))

    to.like(0).upto(dim, _LANES, move)


@_written
def _pack(column: _Value, query: _Value, dim: _Value, factor: _Value) -> None:
    """One lane of the queries [D][LANES] = factor * query [D]."""
    column.like(0).upto(dim, 1, lambda d: (column + d * _BYTES).store((query + d * 4).load(_F32) * factor))


@_written
def _scores(scores: _Value, queries: _Value, addresses: _Value, count: _Value, dim: _Value) -> None:
    """scores [count][LANES] = keys [D] at `addresses` [count] times queries [D][LANES]; count a multiple of 8."""
    num_keys = 8 if _has_wide_registers() else 4

    def tile(key: _Value) -> None:
        rows = [(addresses + key * 8 + 8 * i).load(_I64) for i in range(num_keys)]

        def elements(d: _Value, *sums: _Value) -> list[_Value]:
            new = list(sums)
            for u in range(_UNROLL):
                query = (queries + d * _BYTES + u * _BYTES).load()
                new = [
                    query.times((row + d * 4 + 4 * u).load(_F32).splat(), total)
                    for row, total in zip(rows, new)
                ]
            return new

        zeros = [_Value(key.b, ir.Constant(_VECTOR, [0.0] * _LANES))] * num_keys
        for i, total in enumerate(key.like(0).upto(dim, _UNROLL, elements, *zeros)):
            (scores + key * _BYTES + i * _BYTES).store(total)

    count.like(0).upto(count, num_keys, tile)


@_written
def _cap(scores: _Value, count: _Value, cap: _Value) -> None:
    """scores = cap * tanh(x) where they are 2 x log2(e)."""

    def bend(j: _Value) -> None:
        at = scores + j * _BYTES
        at.store(_tanh(at.load()) * cap.splat())

    count.like(0).upto(count, 1, bend)


@_written
def _weigh(
    scores: _Value, count: _Value, first: _Value, ranges: _Value, state: _Value, factors: _Value
) -> None:
    """From scores of the positions from `first` on to weights 2^(score - maximum), merged into the state."""
    low, high = ranges.load(_INTS), (ranges + _SUMS).load(_INTS)

    def mask(j: _Value, top: _Value) -> list[_Value]:
        at, key = scores + j * _BYTES, (first + j).narrow().splat()
        score = at.load().where((low - 1 < key) & (key < high), float("-inf"))
        at.store(score)
        return [score.where(top < score, top)]

    def weigh(j: _Value, total: _Value) -> list[_Value]:
        at = scores + j * _BYTES
        weight = _exp2(at.load() - top)
        at.store(weight)
        return [total + weight]

    zero = _Value(count.b, ir.Constant(_VECTOR, [0.0] * _LANES))
    (top,) = count.like(0).upto(count, 1, mask, zero.like(_LOWEST))
    (total,) = count.like(0).upto(count, 1, weigh, zero)
    _merge(state, top, total, factors)


def _merge(state: _Value, top: _Value, total: _Value, factors: _Value) -> None:
    """Take in a part's maximum and sum of weights; leaves the factors of the old and the part's sums of values."""
    old = state.load()
    highest = top.where(old < top, old)
    factors.store(_exp2(old - highest))
    (factors + _SUMS).store(_exp2(top - highest))
    state.store(highest)
    (state + _SUMS).store(total.times((factors + _SUMS).load(), (state + _SUMS).load() * factors.load()))


@_written
def _merge_state(state: _Value, other: _Value, factors: _Value) -> None:
    _merge(state, other.load(), (other + _SUMS).load(), factors)


@_written
def _merge_row(sums: _Value, other: _Value, dim: _Value, factors: _Value) -> None:
    old, new = factors.load(_F32).splat(), (factors + _SUMS).load(_F32).splat()

    def merge(d: _Value) -> None:
        at = sums + d * 4
        at.store((other + d * 4).load().times(new, at.load() * old))

    dim.like(0).upto(dim, _LANES, merge)


def _values_code(at_edge: bool) -> Any:
    @_written
    def values(
        sums: _Value, weights: _Value, addresses: _Value, count: _Value, dim: _Value, factors: _Value
    ) -> None:
        def columns(width: int) -> Callable[[_Value], None]:
            def column(d: _Value) -> None:
                def add(j: _Value, *totals: _Value) -> list[_Value]:
                    row = (addresses + j * 8).load(_I64) + d * 4
                    vectors = [(row + i * _BYTES).load() for i in range(width)]
                    new = []
                    for r in range(4):
                        weight = (weights + j * _BYTES + 4 * r).load(_F32).splat()
                        for i in range(width):
                            total = totals[r * width + i]
                            more = vectors[i].times(weight, total)
                            new.append(more.where(weight.like(0.0) < weight, total) if at_edge else more)
                    return new

                zero = _Value(d.b, ir.Constant(_VECTOR, [0.0] * _LANES))
                totals = d.like(0).upto(count, 1, add, *[zero] * (4 * width))
                for r in range(4):
                    old, new = (
                        (factors + 4 * r).load(_F32).splat(),
                        (factors + 4 * r + _SUMS).load(_F32).splat(),
                    )
                    for i in range(width):
                        at = sums + dim * (4 * r) + d * 4 + i * _BYTES
                        at.store(totals[r * width + i].times(new, at.load() * old))

            return column

        width = 4 if _has_wide_registers() else 1
        whole = dim & -(_LANES * width)
        dim.like(0).upto(whole, _LANES * width, columns(width))
        whole.upto(dim, _LANES, columns(1))

    return values


_values, _values_at_edge = _values_code(False), _values_code(True)


@_written
def _finish(out: _Value, sums: _Value, total: _Value, dim: _Value) -> None:
    def divide(d: _Value) -> None:
        (out + d * 4).store((sums + d * 4).load() / total.load(_F32).splat() + 0.0)

    dim.like(0).upto(dim, _LANES, divide)


@intrinsic
def _next(_: Any, counter: Any) -> Any:
    """The number at an address before one is added to it; no two threads get the same."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType())
        return builder.atomic_rmw("add", pointer, ir.Constant(_I64, 1), "acq_rel")

    return types.int64(types.int64), generate


# -- work ----------------------------------------------------------------------------------------------------------


class _Scratch(NamedTuple):
    ranges: Any
    slots: Any
    addresses: Any
    queries: int
    scores: int
    factors: int
    wide: int
    state: int


@njit
def _prepare(tile: Any, q: Rows, factor: float, window: int, sizes: Sizes, scratch: _Scratch) -> None:
    """Lay the tile's queries out as [group][D][LANES], and say what each row sees."""
    ratio, dim = sizes.ratio, sizes.dim
    scratch.ranges[:] = 0
    _clear(scratch.queries, (tile.count + 15) // 16 * 16 * dim * 4)
    for i in range(tile.count):
        flat = tile.row + i
        position = tile.start + flat // ratio
        scratch.ranges[0, i], scratch.ranges[1, i] = max(0, position - window + 1), position + 1
        row = q.address + (tile.token + flat // ratio) * q.row + (tile.head * ratio + flat % ratio) * q.head
        _pack(scratch.queries + i // 16 * dim * 64 + i % 16 * 4, row, dim, factor)


@njit
def _find(slots: Any, table: Any, block_size: int, first: int, count: int) -> None:
    block, offset = first // block_size, first % block_size
    for j in range(count):
        slots[j] = table[block] * block_size + offset
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0


@njit
def _fetch(pool: Rows, head: int, count: int, sizes: Sizes, scratch: _Scratch) -> None:
    for j in range(count):
        row = pool.address + scratch.slots[j] * pool.row + head * pool.head
        if sizes.element != FLOAT32:
            wide = scratch.wide + j * sizes.dim * 4
            if sizes.element == BFLOAT16:
                _widen_bfloat16(wide, row, sizes.dim)
            else:
                _widen_float16(wide, row, sizes.dim)
            row = wide
        scratch.addresses[j] = row
    scratch.addresses[count : (count + 7) // 8 * 8] = scratch.addresses[count - 1]


@njit
def _attend_part(
    tile: Any,
    part: int,
    state: int,
    keys: Rows,
    values: Rows,
    table: Any,
    window: int,
    cap: float,
    sizes: Sizes,
    scratch: _Scratch,
) -> None:
    dim = sizes.dim
    first = max(part * PART, tile.low)
    count = min((part + 1) * PART, tile.high) - first
    addresses = scratch.addresses.ctypes.data
    ranges = scratch.ranges.ctypes.data
    _find(scratch.slots, table[tile.seq], sizes.block, first, count)
    _fetch(keys, tile.head, count, sizes, scratch)
    for row in range(0, tile.count, _LANES):
        scores = scratch.scores + row * PART * 4
        _scores(scores, scratch.queries + row * dim * 4, addresses, (count + 7) // 8 * 8, dim)
        if cap > 0:
            _cap(scores, count, cap)
        _weigh(scores, count, first, ranges + row * 4, state + row * 4, scratch.factors + row * 4)
    _fetch(values, tile.head, count, sizes, scratch)
    last_row = tile.start + (tile.row + tile.count - 1) // sizes.ratio
    edge = first + count - 1 > tile.start + tile.row // sizes.ratio or first <= last_row - window
    for row in range(0, tile.count, 4):
        weights = scratch.scores + row // _LANES * PART * _BYTES + row % _LANES * 4
        sums = state + 2 * _SUMS + row * dim * 4
        if edge:
            _values_at_edge(sums, weights, addresses, count, dim, scratch.factors + row * 4)
        else:
            _values(sums, weights, addresses, count, dim, scratch.factors + row * 4)


@njit
def _reset(state: int, tile: Any) -> None:
    _lower(state, _SUMS)
    _clear(state + _SUMS, tile.state * 4 - _SUMS)


@njit
def _combine(tile: Any, states: int, dim: int, factors: int) -> None:
    for part in range(1, tile.end - tile.first):
        other = states + part * tile.state * 4
        for row in range(0, tile.count, _LANES):
            _merge_state(states + row * 4, other + row * 4, factors + row * 4)
        for row in range(tile.count):
            at = 2 * _SUMS + row * dim * 4
            _merge_row(states + at, other + at, dim, factors + row * 4)


@njit
def _write(tile: Any, state: int, out: Rows, sizes: Sizes) -> None:
    for i in range(tile.count):
        flat = tile.row + i
        row = (
            out.address
            + (tile.token + flat // sizes.ratio) * out.row
            + (tile.head * sizes.ratio + flat % sizes.ratio) * out.head
        )
        _finish(row, state + 2 * _SUMS + i * sizes.dim * 4, state + _SUMS + i * 4, sizes.dim)


@njit
def _work(
    counter: Any,
    left: Any,
    states: int,
    tiles: Any,
    items: Any,
    q: Rows,
    out: Rows,
    keys: Rows,
    values: Rows,
    table: Any,
    factor: float,
    window: int,
    cap: float,
    sizes: Sizes,
) -> None:
    dim = sizes.dim
    floats = np.empty(TILE_ROWS * dim * 2 + 4 * PART * 16 + PART * dim + 4 * TILE_ROWS + 16, np.float32)
    queries = (floats.ctypes.data + 63) // 64 * 64
    scores = queries + TILE_ROWS * dim * 4
    factors = scores + TILE_ROWS * PART * 4
    wide = factors + 2 * _SUMS
    own = wide + PART * dim * 4
    scratch = _Scratch(
        np.empty((2, TILE_ROWS), np.int32),
        np.empty(PART, np.int64),
        np.empty(PART, np.int64),
        queries,
        scores,
        factors,
        wide,
        own,
    )
    while True:
        at = _next(counter.ctypes.data)
        if at >= len(items):
            break
        item = items[at]
        tile = tiles[item.tile]
        _prepare(tile, q, factor, window, sizes, scratch)
        if item.part < 0:
            _reset(own, tile)
            for part in range(tile.first, tile.end):
                _attend_part(tile, part, own, keys, values, table, window, cap, sizes, scratch)
            _write(tile, own, out, sizes)
        else:
            state = states + (tile.states + (item.part - tile.first) * tile.state) * 4
            _reset(state, tile)
            _attend_part(tile, item.part, state, keys, values, table, window, cap, sizes, scratch)
            if _next(left.ctypes.data + item.tile * 8) == tile.end - tile.first - 1:
                base = states + tile.states * 4
                _combine(tile, base, dim, factors)
                _write(tile, base, out, sizes)
    floats[0] = 0


@njit
def _store_rows(begin: int, end: int, new: Rows, pool: Rows, slots: Any, sizes: Sizes) -> None:
    size = sizes.dim * (4 if sizes.element == FLOAT32 else 2)
    for row in range(begin, end):
        for head in range(sizes.kv_heads):
            _copy(
                pool.address + slots[row] * pool.row + head * pool.head,
                new.address + row * new.row + head * new.head,
                size,
            )


@njit(parallel=True, nogil=True)
def store(k: Rows, v: Rows, keys: Rows, values: Rows, slots: Any, sizes: Sizes, workers: int) -> None:
    share = -(-len(slots) // workers)
    for worker in prange(workers):
        begin, end = worker * share, min((worker + 1) * share, len(slots))
        _store_rows(begin, end, k, keys, slots, sizes)
        _store_rows(begin, end, v, values, slots, sizes)


@njit(parallel=True, nogil=True)
def attend(
    q: Rows,
    out: Rows,
    keys: Rows,
    values: Rows,
    table: Any,
    tiles: Any,
    items: Any,
    num_floats: int,
    sizes: Sizes,
    factor: float,
    cap: float,
    window: int,
    workers: int,
) -> None:
    states = np.empty(num_floats + 16, np.float32)
    base = (states.ctypes.data + 63) // 64 * 64
    counter = np.zeros(1, np.int64)
    left = np.zeros(len(tiles), np.int64)
    for worker in prange(workers):
        _work(
            worker, counter, left, base, tiles, items, q, out, keys, values, table, factor, window, cap, sizes
        )
    states[0] = 0


def _has_wide_registers() -> bool:
    return bool(llvm.get_host_cpu_features().get("avx512f"))
