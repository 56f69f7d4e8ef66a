"""Vector code that runs as it is written: numbers, vectors and loops, translated by LLVM one to one.

A compiler that vectorises a loop may reorder its sums, and differently in two places. So the loops that
compute are written out operation by operation; LLVM has no leave to contract or reorder them. What a lane
computes is the same on every machine that fuses multiply and add, however wide its registers.

`written` makes a function for compiled code from a Python function that writes its code. All addresses,
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
# 2^r = 1 + r (c0 + c1 r + ..) for |r| <= 1/2: least squares, reweighted to equal ripple; error 2e-9.
_EXP2 = (0.6931472, 0.24022648, 0.055503324, 0.009618437, 0.0013398874, 0.00015353362)
ROUND = 12582912.0
"""1.5 * 2^23: adding it leaves the nearest integer in the low bits."""


class Value:
    """A number or vector in the code being written. A plain number beside it is a constant of its type."""

    def __init__(self, builder: Any, code: Any) -> None:
        self.b, self.code = builder, code
        self.is_float = getattr(code.type, "element", code.type) == FLOAT

    def like(self, other: "Value | float", kind: Any = None) -> "Value":
        if isinstance(other, Value):
            return other
        kind = kind or self.code.type
        is_vector = isinstance(kind, ir.VectorType)
        return Value(self.b, ir.Constant(kind, [other] * kind.count if is_vector else other))

    def floats(self, number: float) -> "Value":
        """A number in all lanes."""
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
        """Of a signed integer."""
        return self._do("ashr", bits)

    def __and__(self, other: "Value | float") -> "Value":
        return self._do("and_", other)

    def __or__(self, other: "Value") -> "Value":
        return self._do("or_", other)

    def __lt__(self, other: "Value | float") -> "Value":
        """False where either is NaN."""
        compare = self.b.fcmp_ordered if self.is_float else self.b.icmp_signed
        return Value(self.b, compare("<", self.code, self.like(other).code))

    def call(self, name: str, *others: "Value | float", returns: Any = None) -> "Value":
        """An LLVM intrinsic of this value and others; it returns this value's type if not told."""
        values = [self, *(self.like(other) for other in others)]
        kind = ir.FunctionType(returns or self.code.type, [value.code.type for value in values])
        function = self.b.module.declare_intrinsic(name, fnty=kind)
        return Value(self.b, self.b.call(function, [value.code for value in values]))

    def times(self, factor: "Value", plus: "Value | float") -> "Value":
        """self * factor + plus, rounded once."""
        return self.call(f"llvm.fma.v{LANES}f32", factor, plus)

    def where(self, condition: "Value", other: "Value | float") -> "Value":
        """self where the condition holds, else other."""
        return Value(self.b, self.b.select(condition.code, self.code, self.like(other).code))

    def cast(self, operation: str, kind: Any) -> "Value":
        return Value(self.b, getattr(self.b, operation)(self.code, kind))

    def bits(self, kind: Any) -> "Value":
        return self.cast("bitcast", kind)

    def lane(self, index: int) -> "Value":
        return Value(self.b, self.b.extract_element(self.code, ir.Constant(INT, index)))

    def lanes(self, *indices: int) -> "Value":
        """A vector of some of its lanes."""
        nothing = ir.Constant(self.code.type, ir.Undefined)
        order = ir.Constant(ir.VectorType(INT, len(indices)), list(indices))
        return Value(self.b, self.b.shuffle_vector(self.code, nothing, order))

    def beside(self, other: "Value") -> "Value":
        """Its lanes, then those of another vector of its type."""
        count = 2 * self.code.type.count
        order = ir.Constant(ir.VectorType(INT, count), list(range(count)))
        return Value(self.b, self.b.shuffle_vector(self.code, other.code, order))

    def splat(self) -> "Value":
        """Itself in all lanes."""
        nothing = ir.Constant(ir.VectorType(self.code.type, LANES), ir.Undefined)
        one = self.b.insert_element(nothing, self.code, ir.Constant(INT64, 0))
        return Value(self.b, self.b.shuffle_vector(one, nothing, ir.Constant(INTS, [0] * LANES)))

    def load(self, kind: Any = FLOATS) -> "Value":
        """What is at this address."""
        pointer = self.b.inttoptr(self.code, ir.PointerType())
        return Value(self.b, self.b.load(pointer, typ=kind, align=_align(kind)))

    def store(self, value: "Value") -> None:
        pointer = self.b.inttoptr(self.code, ir.PointerType())
        self.b.store(value.code, pointer, align=_align(value.code.type))

    def stream(self, value: "Value") -> None:
        """Store past the caches, at a multiple of the value's size."""
        pointer = self.b.inttoptr(self.code, ir.PointerType())
        store = self.b.store(value.code, pointer, align=64)
        store.set_metadata("nontemporal", self.b.module.add_metadata([ir.Constant(INT, 1)]))

    def prefetch(self) -> None:
        """Begin to bring this address's cache line near."""
        pointer = ir.PointerType()
        kind = ir.FunctionType(ir.VoidType(), [pointer, INT, INT, INT])
        fetch = self.b.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
        self.b.call(fetch, [self.b.inttoptr(self.code, pointer), INT(0), INT(3), INT(1)])

    def upto(self, end: "Value", step: int, body: Callable[..., Any], *values: "Value") -> list["Value"]:
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

    def among(self, bodies: dict[int, Callable[[], None]]) -> None:
        """Run the body of this number, or none."""
        b, after = self.b, self.b.append_basic_block("after")
        switch = b.switch(self.code, after)
        for number, body in bodies.items():
            block = b.append_basic_block(f"case{number}")
            switch.add_case(ir.Constant(self.code.type, number), block)
            b.position_at_end(block)
            body()
            b.branch(after)
        b.position_at_end(after)

    def each(self, step: int, body: Callable[["Value"], None]) -> None:
        """for i in range(0, self, step): body(i)"""
        self.like(0).upto(self, step, body)


def _align(kind: Any) -> int:
    """Nothing is promised but that a number lies where numbers of its size may."""
    return 1 if getattr(kind, "element", kind) == BYTE else 2


def written(write: Callable[..., None]) -> Any:
    """A function for compiled code, of integers and float32, whose code `write(*values)` writes."""

    unpack: Any = cgutils.unpack_tuple
    arguments_of: Any = types.StarArgTuple.from_types

    def typed(_: Any, *given: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            write(*(Value(builder, code) for code in unpack(builder, arguments[0])))
            return context.get_dummy_value()

        kinds = [types.float32 if isinstance(kind, types.Float) else types.int64 for kind in given]
        return types.void(arguments_of(kinds)), generate

    return intrinsic(typed)


def _next_number(_: Any, _counter: Any) -> Any:
    """The int64 at an address before one is added to it; no two threads get the same."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType())
        return builder.atomic_rmw("add", pointer, ir.Constant(INT64, 1), "acq_rel")

    return types.int64(types.int64), generate


next_number: Any = intrinsic(_next_number)


@written
def copy(to: Value, source: Value, size: Value) -> None:
    """`size` bytes, a multiple of 32."""
    size.each(32, lambda i: (to + i).store((source + i).load(SHORTS)))


def has(*features: str) -> bool:
    """Whether the processor that code is compiled for has all of these, by LLVM's names."""
    settings: Any = config
    told = settings.CPU_FEATURES
    found = get_host_cpu_features() if told is None else told  # type: ignore[no-untyped-call]
    return {f"+{feature}" for feature in features} <= set(found.split(","))


def fuses_multiply_add() -> bool:
    """Whether the machine does. Only x86 says, and only there may it not."""
    return has("fma") or "fma" not in llvm.get_host_cpu_features()


def has_wide_registers() -> bool:
    """Whether there are 32 registers of LANES floats, and not 16 of half of them. Affects the speed only."""
    return has("avx512f")


def _exp2_terms(t: Value) -> tuple[Value, Value, Value]:
    """n << 23, r and p, where 2^t = 2^n (1 + r p)."""
    rounded = t + ROUND
    r = t - (rounded - ROUND)
    *rest, p = (t.floats(factor) for factor in _EXP2)
    for factor in reversed(rest):
        p = p.times(r, factor)
    return rounded.bits(INTS) << 23, r, p


def exp2(t: Value) -> Value:
    """2^t for t <= 0, within 1 ulp; exactly 1 at 0, and 0 below -125. NaN stays NaN."""
    n, r, p = _exp2_terms(t)
    power = (p.times(r, 1.0).bits(INTS) + n).bits(FLOATS)
    return t.floats(0.0).where(t < -125.0, power)


def size_of(t: Value) -> Value:
    """|t|"""
    return (t.bits(INTS) & (2**31 - 1)).bits(FLOATS)


def tanh(t: Value) -> Value:
    """tanh(x), given t = 2 x log2(e), as e / (e + 2) with e = 2^|t| - 1."""
    sign, size = t.bits(INTS) & -(2**31), size_of(t)
    n, r, p = _exp2_terms(t.floats(40.0).where(t.floats(40.0) < size, size))
    whole = (n + (127 << 23)).bits(FLOATS)
    e = whole.times(p * r, whole - 1.0)
    return ((e / (e + 2.0)).bits(INTS) | sign).bits(FLOATS)
