"""Emits LLVM IR for scalars, vectors and loops, operation by operation.

A compiler that vectorizes a loop may reorder its sums, and differently in two places. So the loops of the
kernels are written as explicit vector operations, without fast-math flags: LLVM must not contract or reorder
them. A lane computes the same bits on every machine with fused multiply-add, whatever the width of its
registers.

`intrinsic_from` turns a Python function that emits code into a function that numba can call. All addresses,
strides and sizes are in bytes unless a docstring says otherwise.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

LANES = 16
VECTOR_BYTES = 4 * LANES

FLOAT, HALF = ir.FloatType(), ir.HalfType()
BYTE, SHORT, INT, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS, HALVES, BYTES, SHORTS, INTS = (ir.VectorType(kind, LANES) for kind in (FLOAT, HALF, BYTE, SHORT, INT))
LOG2_E = 1.4426950408889634
# 2^r = 1 + r (c0 + c1 r + ..) for |r| <= 1/2. Fitted by least squares, reweighted to equal ripple; error
# 2e-9.
_EXP2 = (0.6931472, 0.24022648, 0.055503324, 0.009618437, 0.0013398874, 0.00015353362)
ROUND = 12582912.0
"""1.5 * 2^23. After adding it to a float, the low bits are the nearest integer."""


class Value:
    """A scalar or vector in the emitted code. In operations, a Python number is a constant of the same
    type."""

    def __init__(self, builder: ir.IRBuilder, code: ir.Value) -> None:
        self.b, self.code = builder, code
        self.is_float = getattr(code.type, "element", code.type) == FLOAT

    def like(self, other: "Value | float", kind: ir.Type | None = None) -> "Value":
        if isinstance(other, Value):
            return other
        kind = kind or self.code.type
        is_vector = isinstance(kind, ir.VectorType)
        return Value(self.b, ir.Constant(kind, [other] * kind.count if is_vector else other))

    def floats(self, number: float) -> "Value":
        """A vector with the same float in all lanes."""
        return self.like(number, FLOATS)

    def _do(self, name: str, other: "Value | float") -> "Value":
        return Value(self.b, getattr(self.b, name)(self.code, self.like(other).code))

    def __add__(self, other: "Value | float") -> "Value":
        return self._do("fadd" if self.is_float else "add", other)

    def __sub__(self, other: "Value | float") -> "Value":
        return self._do("fsub" if self.is_float else "sub", other)

    def __mul__(self, other: "Value | float") -> "Value":
        return self._do("fmul" if self.is_float else "mul", other)

    def __truediv__(self, other: "Value") -> "Value":
        return self._do("fdiv", other)

    def __lshift__(self, bits: int) -> "Value":
        return self._do("shl", bits)

    def __rshift__(self, bits: int) -> "Value":
        """An arithmetic shift of signed integers."""
        return self._do("ashr", bits)

    def __and__(self, other: "Value | float") -> "Value":
        return self._do("and_", other)

    def __or__(self, other: "Value") -> "Value":
        return self._do("or_", other)

    def __lt__(self, other: "Value | float") -> "Value":
        """A signed or ordered comparison: false if either side is NaN."""
        compare = self.b.fcmp_ordered if self.is_float else self.b.icmp_signed
        return Value(self.b, compare("<", self.code, self.like(other).code))

    def call(self, name: str, *others: "Value | float", returns: ir.Type | None = None) -> "Value":
        """Call an LLVM intrinsic with this value and others. By default it returns the type of this value."""
        values = [self, *(self.like(other) for other in others)]
        kind = ir.FunctionType(returns or self.code.type, [value.code.type for value in values])
        function = self.b.module.declare_intrinsic(name, fnty=kind)
        return Value(self.b, self.b.call(function, [value.code for value in values]))

    def fma(self, factor: "Value", plus: "Value | float") -> "Value":
        """self * factor + plus, with a single rounding."""
        return self.call(f"llvm.fma.v{LANES}f32", factor, plus)

    def select(self, condition: "Value", other: "Value | float") -> "Value":
        """This value where the condition is true, otherwise `other`."""
        return Value(self.b, self.b.select(condition.code, self.code, self.like(other).code))

    def cast(self, operation: str, kind: ir.Type) -> "Value":
        return Value(self.b, getattr(self.b, operation)(self.code, kind))

    def bitcast(self, kind: ir.Type) -> "Value":
        return self.cast("bitcast", kind)

    def lane(self, index: int) -> "Value":
        return Value(self.b, self.b.extract_element(self.code, ir.Constant(INT, index)))

    def lanes(self, *indices: int) -> "Value":
        """A vector of the lanes with these indices."""
        nothing = ir.Constant(self.code.type, ir.Undefined)
        order = ir.Constant(ir.VectorType(INT, len(indices)), list(indices))
        return Value(self.b, self.b.shuffle_vector(self.code, nothing, order))

    def concat(self, other: "Value") -> "Value":
        """The lanes of this vector followed by those of another one of the same type."""
        count = 2 * self.code.type.count
        order = ir.Constant(ir.VectorType(INT, count), list(range(count)))
        return Value(self.b, self.b.shuffle_vector(self.code, other.code, order))

    def splat(self) -> "Value":
        """A vector with this scalar in all lanes."""
        nothing = ir.Constant(ir.VectorType(self.code.type, LANES), ir.Undefined)
        one = self.b.insert_element(nothing, self.code, ir.Constant(INT64, 0))
        return Value(self.b, self.b.shuffle_vector(one, nothing, ir.Constant(INTS, [0] * LANES)))

    def load(self, kind: ir.Type = FLOATS) -> "Value":
        """Load from this address."""
        pointer = self.b.inttoptr(self.code, ir.PointerType())
        return Value(self.b, self.b.load(pointer, typ=kind, align=_align(kind)))

    def store(self, value: "Value") -> None:
        pointer = self.b.inttoptr(self.code, ir.PointerType())
        self.b.store(value.code, pointer, align=_align(value.code.type))

    def store_nontemporal(self, value: "Value") -> None:
        """Store to this address without filling the caches. The address must be a multiple of the value's
        size."""
        pointer = self.b.inttoptr(self.code, ir.PointerType())
        store = self.b.store(value.code, pointer, align=64)
        store.set_metadata("nontemporal", self.b.module.add_metadata([ir.Constant(INT, 1)]))

    def prefetch(self) -> None:
        """Prefetch the cache line of this address."""
        pointer = ir.PointerType()
        kind = ir.FunctionType(ir.VoidType(), [pointer, INT, INT, INT])
        fetch = self.b.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
        self.b.call(fetch, [self.b.inttoptr(self.code, pointer), INT(0), INT(3), INT(1)])

    def range_loop(
        self, end: "Value", step: int, body: Callable[..., Any], *values: "Value"
    ) -> list["Value"]:
        """for i in range(self, end, step): values = body(i, *values)"""
        b, before = self.b, self.b.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
        b.branch(head)
        b.position_at_end(head)
        starts = (self, *values)
        index, *carried = phis = [Value(b, b.phi(value.code.type)) for value in starts]
        b.cbranch((index < end).code, inside, after)
        b.position_at_end(inside)
        new = body(index, *carried) or ()
        for phi, first, value in zip(phis, starts, (index + step, *new), strict=True):
            phi.code.add_incoming(first.code, before)
            phi.code.add_incoming(value.code, b.block)
        b.branch(head)
        b.position_at_end(after)
        return carried

    def switch(self, bodies: dict[int, Callable[[], None]]) -> None:
        """A switch: run the body with this number, or none."""
        b, after = self.b, self.b.append_basic_block("after")
        switch = b.switch(self.code, after)
        for number, body in bodies.items():
            block = b.append_basic_block(f"case{number}")
            switch.add_case(ir.Constant(self.code.type, number), block)
            b.position_at_end(block)
            body()
            b.branch(after)
        b.position_at_end(after)

    def for_each(self, step: int, body: Callable[["Value"], None]) -> None:
        """for i in range(0, self, step): body(i)"""
        self.like(0).range_loop(self, step, body)


def _align(kind: ir.Type) -> int:
    """The alignment of a load or store: only that of 16-bit numbers is guaranteed, and of bytes none."""
    return 1 if getattr(kind, "element", kind) == BYTE else 2


def intrinsic_from(emit: Callable[..., None]) -> Any:
    """A function of integers and float32 for compiled code. `emit(*values)` emits its body."""

    unpack: Any = cgutils.unpack_tuple
    arguments_of: Any = types.StarArgTuple.from_types

    def typed(_: Any, *given: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _: Any, arguments: Any) -> Any:
            emit(*(Value(builder, code) for code in unpack(builder, arguments[0])))
            return context.get_dummy_value()

        kinds = [types.float32 if isinstance(kind, types.Float) else types.int64 for kind in given]
        return types.void(arguments_of(kinds)), generate

    return intrinsic(typed)


def _next_number(_: Any, _counter: Any) -> Any:
    """Atomically add one to the int64 at an address, and return its old value."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType())
        return builder.atomic_rmw("add", pointer, ir.Constant(INT64, 1), "acq_rel")

    return types.int64(types.int64), generate


next_number: Any = intrinsic(_next_number)


@intrinsic_from
def copy(to: Value, source: Value, size: Value) -> None:
    """Copy `size` bytes, a multiple of 32."""
    size.for_each(32, lambda i: (to + i).store((source + i).load(SHORTS)))


def has_features(*features: str) -> bool:
    """Whether the target CPU has all of these features, by LLVM's names."""
    settings: Any = config
    configured = settings.CPU_FEATURES
    found = get_host_cpu_features() if configured is None else configured  # type: ignore[no-untyped-call]
    return {f"+{feature}" for feature in features} <= set(found.split(","))


def fuses_multiply_add() -> bool:
    """Whether the machine has fused multiply-add. LLVM reports it only on x86; all other targets have it."""
    return has_features("fma") or "fma" not in llvm.get_host_cpu_features()


def has_wide_registers() -> bool:
    """Whether there are 32 registers of LANES floats, or only 16 of half the width. It affects only the
    speed."""
    return has_features("avx512f")


def _exp2_terms(t: Value) -> tuple[Value, Value, Value]:
    """n << 23, r and p with 2^t = 2^n (1 + r p)."""
    rounded = t + ROUND
    r = t - (rounded - ROUND)
    *rest, p = (t.floats(factor) for factor in _EXP2)
    for factor in reversed(rest):
        p = p.fma(r, factor)
    return rounded.bitcast(INTS) << 23, r, p


def exp2(t: Value) -> Value:
    """2^t for t <= 0, within 1 ulp. Exactly 1 at 0, and 0 below -125. NaN for NaN."""
    n, r, p = _exp2_terms(t)
    power = (p.fma(r, 1.0).bitcast(INTS) + n).bitcast(FLOATS)
    return t.floats(0.0).select(t < -125.0, power)


def absolute(t: Value) -> Value:
    """|t|"""
    return (t.bitcast(INTS) & (2**31 - 1)).bitcast(FLOATS)


def tanh(t: Value) -> Value:
    """tanh(x), given t = 2 x log2(e), as e / (e + 2) with e = 2^|t| - 1."""
    sign, size = t.bitcast(INTS) & -(2**31), absolute(t)
    n, r, p = _exp2_terms(t.floats(40.0).select(t.floats(40.0) < size, size))
    whole = (n + (127 << 23)).bitcast(FLOATS)
    e = whole.fma(p * r, whole - 1.0)
    return ((e / (e + 2.0)).bitcast(INTS) | sign).bitcast(FLOATS)
