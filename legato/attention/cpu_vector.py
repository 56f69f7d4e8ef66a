"""The arithmetic of the CPU's attention, as vector code that runs as it is written. Knows addresses only.

A compiler that vectorises a loop may reorder its sums, and differently in two places. So the loops that
compute are written out here operation by operation; LLVM translates them and has no leave to contract or
reorder. The bits are the same on every machine that fuses multiply and add, however wide its registers:

- in the scores a lane of a vector is one query row, in the output it is one element of a value: no sum runs
  across lanes;
- a score is one chain of fused multiply-adds over the head's elements, first to last; sums over positions run
  from the first to the last too, and a position that a row does not see changes no bit of them.

A tile has up to TILE_ROWS query rows. Its scores and weights lie as [group of LANES rows][position][lane],
its queries as [group][element][lane]. A state is the result of some positions: the maximum score of each row,
its sum of weights 2^(score - maximum), and its weighted sum of values, as [TILE_ROWS], [TILE_ROWS], [rows][D]
floats. All addresses, strides and sizes are in bytes, except D (`dim`).
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
TILE_ROWS = 64
VECTOR_BYTES = 4 * LANES
SUMS = 4 * TILE_ROWS
"""From a state's maxima to its sums of weights, and from the old to the new factors of a merge."""

AHEAD = 16
"""How many keys or values ahead memory is fetched: without it decodes wait for memory half of the time."""

_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(ir.IntType(32), LANES)
_SHORTS, _HALVES = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.HalfType(), LANES)
_LOWEST = float(np.finfo(np.float32).min)
# 2^r = 1 + r (c0 + c1 r + ..) for |r| <= 1/2: least squares, reweighted to equal ripple; error 2e-9.
_EXP2 = (0.6931472, 0.24022648, 0.055503324, 0.009618437, 0.0013398874, 0.00015353362)
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits


class _Value:
    """A number or vector in the code being written. A plain number beside it is a constant of its type."""

    def __init__(self, builder: Any, code: Any) -> None:
        self.b, self.code = builder, code
        self.is_float = getattr(code.type, "element", code.type) == _FLOAT

    def like(self, other: "_Value | float", kind: Any = None) -> "_Value":
        if isinstance(other, _Value):
            return other
        kind = kind or self.code.type
        return _Value(
            self.b, ir.Constant(kind, [other] * LANES if isinstance(kind, ir.VectorType) else other)
        )

    def floats(self, number: float) -> "_Value":
        """A number in all lanes."""
        return self.like(number, _FLOATS)

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
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fma = self.b.module.declare_intrinsic(f"llvm.fma.v{LANES}f32", fnty=kind)
        return _Value(self.b, self.b.call(fma, [self.code, factor.code, self.like(plus).code]))

    def where(self, condition: "_Value", other: "_Value | float") -> "_Value":
        """self where the condition holds, else other."""
        return _Value(self.b, self.b.select(condition.code, self.code, self.like(other).code))

    def cast(self, operation: str, kind: Any) -> "_Value":
        return _Value(self.b, getattr(self.b, operation)(self.code, kind))

    def bits(self, kind: Any) -> "_Value":
        return self.cast("bitcast", kind)

    def splat(self) -> "_Value":
        """Itself in all lanes."""
        nothing = ir.Constant(ir.VectorType(self.code.type, LANES), ir.Undefined)
        one = self.b.insert_element(nothing, self.code, ir.Constant(_INT64, 0))
        return _Value(self.b, self.b.shuffle_vector(one, nothing, ir.Constant(_INTS, [0] * LANES)))

    def load(self, kind: Any = _FLOATS) -> "_Value":
        """What is at this address."""
        return _Value(self.b, self.b.load(self.b.inttoptr(self.code, ir.PointerType()), typ=kind, align=2))

    def prefetch(self) -> None:
        """Begin to bring this address's cache line near."""
        pointer, number = ir.PointerType(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        fetch = self.b.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
        self.b.call(fetch, [self.b.inttoptr(self.code, pointer), number(0), number(3), number(1)])

    def store(self, value: "_Value") -> None:
        self.b.store(value.code, self.b.inttoptr(self.code, ir.PointerType()), align=2)

    def upto(self, end: "_Value", step: int, body: Callable[..., Any], *values: "_Value") -> list["_Value"]:
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

    def each(self, step: int, body: Callable[["_Value"], None]) -> None:
        """for i in range(0, self, step): body(i)"""
        self.like(0).upto(self, step, body)


def _written(write: Callable[..., None]) -> Any:
    """A function for compiled code, of integers and float32, whose code `write(*values)` writes."""

    unpack: Any = cgutils.unpack_tuple
    arguments_of: Any = types.StarArgTuple.from_types

    def typed(_: Any, *given: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            write(*(_Value(builder, code) for code in unpack(builder, arguments[0])))
            return context.get_dummy_value()

        kinds = [types.float32 if isinstance(kind, types.Float) else types.int64 for kind in given]
        return types.void(arguments_of(kinds)), generate

    return intrinsic(typed)


def _next_number(_: Any, _counter: Any) -> Any:
    """The int64 at an address before one is added to it; no two threads get the same."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType())
        return builder.atomic_rmw("add", pointer, ir.Constant(_INT64, 1), "acq_rel")

    return types.int64(types.int64), generate


next_number: Any = intrinsic(_next_number)


def fuses_multiply_add() -> bool:
    """Whether the machine does. Only x86 says, and only there may it not."""
    return bool(llvm.get_host_cpu_features().get("fma", True))


def _has_wide_registers() -> bool:
    """Whether there are 32 registers of LANES floats, and not 16 of half of them. Affects the speed only."""
    return bool(llvm.get_host_cpu_features().get("avx512f"))


def _exp2_terms(t: _Value) -> tuple[_Value, _Value, _Value]:
    """n << 23, r and p, where 2^t = 2^n (1 + r p)."""
    rounded = t + _ROUND
    r = t - (rounded - _ROUND)
    *rest, p = (t.floats(factor) for factor in _EXP2)
    for factor in reversed(rest):
        p = p.times(r, factor)
    return rounded.bits(_INTS) << 23, r, p


def _exp2(t: _Value) -> _Value:
    """2^t for t <= 0, within 1 ulp; exactly 1 at 0, and 0 below -125. NaN stays NaN."""
    n, r, p = _exp2_terms(t)
    power = (p.times(r, 1.0).bits(_INTS) + n).bits(_FLOATS)
    return t.floats(0.0).where(t < -125.0, power)


def _tanh(t: _Value) -> _Value:
    """tanh(x), given t = 2 x log2(e), as e / (e + 2) with e = 2^|t| - 1."""
    sign, size = t.bits(_INTS) & -(2**31), (t.bits(_INTS) & (2**31 - 1)).bits(_FLOATS)
    n, r, p = _exp2_terms(t.floats(40.0).where(t.floats(40.0) < size, size))
    whole = (n + (127 << 23)).bits(_FLOATS)
    e = whole.times(p * r, whole - 1.0)
    return ((e / (e + 2.0)).bits(_INTS) | sign).bits(_FLOATS)


@_written
def copy(to: _Value, source: _Value, size: _Value) -> None:
    """`size` bytes, a multiple of 32."""
    size.each(32, lambda i: (to + i).store((source + i).load(_SHORTS)))


@_written
def widen_bfloat16(to: _Value, source: _Value, dim: _Value) -> None:
    def move(d: _Value) -> None:
        short = (source + d * 2).load(_SHORTS)
        (to + d * 4).store((short.cast("zext", _INTS) << 16).bits(_FLOATS))

    dim.each(LANES, move)


@_written
def widen_float16(to: _Value, source: _Value, dim: _Value) -> None:
    dim.each(LANES, lambda d: (to + d * 4).store((source + d * 2).load(_HALVES).cast("fpext", _FLOATS)))


@_written
def pack_query(lane: _Value, query: _Value, dim: _Value, factor: _Value) -> None:
    """One lane of a group's queries = factor * query."""
    dim.each(1, lambda d: (lane + d * VECTOR_BYTES).store((query + d * 4).load(_FLOAT) * factor))


@_written
def clear(address: _Value, size: _Value) -> None:
    """Zeros in `size` bytes, a multiple of VECTOR_BYTES."""
    size.each(VECTOR_BYTES, lambda i: (address + i).store(i.floats(0.0)))


@_written
def reset_state(state: _Value, size: _Value) -> None:
    """The state of no positions, `size` bytes."""
    size.like(0).upto(size.like(SUMS), VECTOR_BYTES, lambda i: (state + i).store(i.floats(_LOWEST)))
    size.like(SUMS).upto(size, VECTOR_BYTES, lambda i: (state + i).store(i.floats(0.0)))


@_written
def score(scores: _Value, queries: _Value, addresses: _Value, count: _Value, dim: _Value) -> None:
    """scores [count][lane] = keys at `addresses` [count] times queries [D][lane]; count a multiple of 8."""
    num_keys = 8 if _has_wide_registers() else 4

    def some_keys(first: _Value) -> None:
        rows = [(addresses + first * 8 + 8 * i).load(_INT64) for i in range(num_keys)]
        ahead = [(addresses + first * 8 + 8 * (i + AHEAD)).load(_INT64) for i in range(num_keys)]

        def add(d: _Value, *sums: _Value) -> list[_Value]:
            new = list(sums)
            for row in ahead:
                (row + d * 4).prefetch()
            for i in range(LANES):
                query = (queries + d * VECTOR_BYTES + i * VECTOR_BYTES).load()
                keys = [(row + d * 4 + i * 4).load(_FLOAT).splat() for row in rows]
                new = [query.times(key, total) for key, total in zip(keys, new, strict=True)]
            return new

        sums = first.like(0).upto(dim, LANES, add, *[first.floats(0.0)] * num_keys)
        for i, total in enumerate(sums):
            (scores + first * VECTOR_BYTES + i * VECTOR_BYTES).store(total)

    count.each(num_keys, some_keys)


@_written
def cap_scores(scores: _Value, count: _Value, cap: _Value) -> None:
    """Scores of 2 x log2(e) become cap * tanh(x)."""

    def bend(j: _Value) -> None:
        at = scores + j * VECTOR_BYTES
        at.store(_tanh(at.load()) * cap.splat())

    count.each(1, bend)


@_written
def weigh(scores: _Value, count: _Value, first: _Value, seen: _Value, state: _Value, factors: _Value) -> None:
    """Scores of `count` positions from `first` on become weights, and are merged into a group's state.

    `seen`: the first position that each row sees, int32 [TILE_ROWS], and then the ends. What a row does not
    see has the weight -0.
    """
    begin, end = seen.load(_INTS), (seen + SUMS).load(_INTS)

    def mask(j: _Value, highest: _Value) -> list[_Value]:
        at, position = scores + j * VECTOR_BYTES, (first + j).cast("trunc", ir.IntType(32)).splat()
        value = at.load().where((begin - 1 < position) & (position < end), float("-inf"))
        at.store(value)
        return [value.where(highest < value, highest)]

    def exponentiate(j: _Value, total: _Value) -> list[_Value]:
        at, value = scores + j * VECTOR_BYTES, (scores + j * VECTOR_BYTES).load()
        weight = _exp2(value - highest)
        at.store(weight.floats(-0.0).where(value < _LOWEST, weight))
        return [total + weight]

    (highest,) = first.like(0).upto(count, 1, mask, first.floats(_LOWEST))
    (total,) = first.like(0).upto(count, 1, exponentiate, first.floats(0.0))
    _merge(state, highest, total, factors)


def _merge(state: _Value, highest: _Value, total: _Value, factors: _Value) -> None:
    """A group's maxima and sums take in those of later positions; leaves factors for the sums of values."""
    top = highest.where(state.load() < highest, state.load())
    old, new = _exp2(state.load() - top), _exp2(highest - top)
    factors.store(old)
    (factors + SUMS).store(new)
    state.store(top)
    (state + SUMS).store(total.times(new, (state + SUMS).load() * old))


@_written
def merge_group(state: _Value, later: _Value, factors: _Value) -> None:
    _merge(state, later.load(), (later + SUMS).load(), factors)


def _factors_of(factors: _Value) -> tuple[_Value, _Value]:
    return factors.load(_FLOAT).splat(), (factors + SUMS).load(_FLOAT).splat()


@_written
def merge_row(values: _Value, later: _Value, dim: _Value, factors: _Value) -> None:
    """One row's sum of values takes in that of later positions."""
    old, new = _factors_of(factors)

    def merge(d: _Value) -> None:
        at = values + d * 4
        at.store((later + d * 4).load().times(new, at.load() * old))

    dim.each(LANES, merge)


def _add_values(is_edge: bool) -> Any:
    @_written
    def add_values(
        sums: _Value, weights: _Value, addresses: _Value, count: _Value, dim: _Value, factors: _Value
    ) -> None:
        """Four rows' sums take in the values at `addresses` [count], weighted by weights [count][lane]."""

        def columns(width: int, d: _Value) -> None:
            def add(j: _Value, *totals: _Value) -> list[_Value]:
                value = (addresses + j * 8).load(_INT64) + d * 4
                parts = [(value + i * VECTOR_BYTES).load() for i in range(width)]
                ahead = (addresses + j * 8 + 8 * AHEAD).load(_INT64) + d * 4
                for i in range(width):
                    (ahead + i * VECTOR_BYTES).prefetch()
                new = []
                for row in range(4):
                    weight = (weights + j * VECTOR_BYTES + row * 4).load(_FLOAT).splat()
                    for part, total in zip(parts, totals[row * width :], strict=False):
                        more = part.times(weight, total)
                        # Even -0 times a value is not nothing if the value is infinite or NaN.
                        bits = weight.bits(_INTS)
                        new.append(total.where(bits < 0, more) if is_edge else more)
                return new

            totals = d.like(0).upto(count, 1, add, *[d.floats(0.0)] * (4 * width))
            for row in range(4):
                old, new = _factors_of(factors + row * 4)
                for i in range(width):
                    at = sums + dim * (4 * row) + d * 4 + i * VECTOR_BYTES
                    at.store(totals[row * width + i].times(new, at.load() * old))

        width = 4 if _has_wide_registers() else 1
        whole = dim & -(LANES * width)
        whole.each(LANES * width, lambda d: columns(width, d))
        whole.upto(dim, LANES, lambda d: columns(1, d))

    return add_values


add_values, add_values_at_edge = _add_values(False), _add_values(True)
"""The same where each row sees all positions; the second also where some do not."""


@_written
def finish(out: _Value, values: _Value, total: _Value, dim: _Value) -> None:
    """A row of the output. Adding 0 makes -0 positive: which zero it is would depend on the tile."""
    dim.each(LANES, lambda d: (out + d * 4).store((values + d * 4).load() / total.load(_FLOAT).splat() + 0.0))
