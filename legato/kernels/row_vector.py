"""What happens to rows between products, as vector code: norms, activations, rotation. Knows addresses only.

Each function takes one row, and sums run in one fixed order: a row's bits depend on nothing else. Counts of
elements are multiples of 16.
"""

from collections.abc import Callable
from typing import Any

from legato.kernels.vector import FLOAT, FLOATS, LANES, LOG2_E, Value, absolute, exp2, intrinsic_from, tanh


def _inverse_rms(row: Value, count: Value, eps: Value) -> Value:
    """1 / sqrt(mean of squares + eps), in all lanes (Zhang and Sennrich 2019)."""

    def add(i: Value, total: Value) -> list[Value]:
        x = (row + i * 4).load()
        return [x.fma(x, total)]

    (total,) = row.like(0).range_loop(count, LANES, add, row.floats(0.0))
    zero = row.like(0.0, FLOAT)
    summed = zero.call(f"llvm.vector.reduce.fadd.v{LANES}f32", total)
    mean = summed / count.cast("sitofp", FLOAT)
    return (zero.like(1.0) / (mean + eps).call("llvm.sqrt.f32")).splat()


@intrinsic_from
def norm(to: Value, row: Value, count: Value, gain: Value, eps: Value) -> None:
    """to = row / rms(row) * gain"""
    factor = _inverse_rms(row, count, eps)
    count.for_each(LANES, lambda i: (to + i * 4).store((row + i * 4).load() * factor * (gain + i * 4).load()))


@intrinsic_from
def add_norm(to: Value, row: Value, count: Value, gain: Value, eps: Value) -> None:
    """to += row / rms(row) * gain"""
    factor = _inverse_rms(row, count, eps)

    def add(i: Value) -> None:
        more = (row + i * 4).load() * factor * (gain + i * 4).load()
        (to + i * 4).store((to + i * 4).load() + more)

    count.for_each(LANES, add)


@intrinsic_from
def add(to: Value, row: Value, count: Value) -> None:
    """to += row"""
    count.for_each(LANES, lambda i: (to + i * 4).store((to + i * 4).load() + (row + i * 4).load()))


def _silu(x: Value) -> Value:
    """x / (1 + e^-x), with e^-|x| only: e^|x| may be infinite."""
    power = exp2(absolute(x) * -LOG2_E)
    share = x.floats(1.0) / (power + 1.0)
    return x * (share * power).select(x < 0.0, share)


def _gelu_tanh(x: Value) -> Value:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    inner = x * (x * x).fma(x.floats(0.044715), 1.0)
    return x * 0.5 * (tanh(inner * (2.0 * LOG2_E * 0.7978845608028654)) + 1.0)


def _gate(activation: Callable[[Value], Value]) -> Any:
    @intrinsic_from
    def gate(to: Value, row: Value, other: Value, count: Value) -> None:
        """to = activation(row) * other"""

        def one(i: Value) -> None:
            (to + i * 4).store(activation((row + i * 4).load()) * (other + i * 4).load())

        count.for_each(LANES, one)

    return gate


gate_silu, gate_gelu_tanh = _gate(_silu), _gate(_gelu_tanh)


@intrinsic_from
def move(to: Value, row: Value, count: Value) -> None:
    """to = row; here any count will do."""
    whole = count & -LANES
    whole.for_each(LANES, lambda i: (to + i * 4).store((row + i * 4).load()))
    whole.range_loop(count, 1, lambda i: (to + i * 4).store((row + i * 4).load(FLOAT)))


@intrinsic_from
def stream(to: Value, row: Value, count: Value) -> None:
    """to = row, past the caches; `to` at a multiple of 64."""
    count.for_each(LANES, lambda i: (to + i * 4).store_nontemporal((row + i * 4).load()))


@intrinsic_from
def scale(to: Value, row: Value, count: Value, factor: Value) -> None:
    """to = row * factor"""
    count.for_each(LANES, lambda i: (to + i * 4).store((row + i * 4).load() * factor.splat()))


@intrinsic_from
def rotate(head: Value, half: Value, cos: Value, sin: Value) -> None:
    """Rotate each pair (i, i + half) of a head by the angle whose cos and sin are given, [half] each."""

    def pair(i: Value) -> None:
        low, high = head + i * 4, head + (half + i) * 4
        x, y, c, s = low.load(FLOATS), high.load(FLOATS), (cos + i * 4).load(), (sin + i * 4).load()
        low.store(x * c - y * s)
        high.store(y * c + x * s)

    half.for_each(LANES, pair)
