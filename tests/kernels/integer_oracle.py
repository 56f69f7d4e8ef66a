"""What w16 and w8 must give, bit for bit: numpy, step by step, sums of integers in int64. Knows no kernel."""

from dataclasses import dataclass

import numpy as np

F32 = np.float32
TINY = F32(1e-30)


def fma(a, b, c):
    """a * b + c of float32, rounded once.

    The product is exact in float64. The sum is rounded to odd there: if it is inexact its last bit becomes 1,
    so that rounding it again, to float32, goes the way that the exact sum would.
    """
    a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    product = a * b
    total = product + c
    with np.errstate(invalid="ignore"):
        back = total - product
        error = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    # Toward zero is one down in the bits of a positive number and of a negative one.
    truncated = bits - ((error != 0) & ((error > 0) != (total > 0)))
    odd = np.where(np.isfinite(total) & (error != 0), truncated | 1, bits)
    with np.errstate(over="ignore"):
        return odd.view(np.float64).astype(F32)


def _grouped(x, group):
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % group)))
    return padded.reshape(len(x), -1, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """One format."""

    group: int
    weight_max: int
    input_max: int

    def pack_inputs(self, x):
        """Integers [T, groups, group] and scales [T, groups] of floats [T, in]: scale = largest / top."""
        x = _grouped(x, self.group)
        largest, top = np.abs(x).max(-1), F32(self.input_max)
        is_zero = largest < TINY
        with np.errstate(divide="ignore", over="ignore"):
            scale = np.where(is_zero, F32(0), largest / top)
            inverse = np.where(is_zero, F32(0), top / largest)
        return np.rint(x * inverse[..., None]).astype(np.int64), scale

    def pack_weights(self, weight):
        """The same of weights; a scale is 1 / 1024 of a float16, the least that the largest fits under."""
        weight = _grouped(weight, self.group)
        largest, top = np.abs(weight).max(-1), F32(self.weight_max / 1024)
        scale = (largest / top).astype(np.float16)
        too_small = scale.astype(F32) * top < largest
        scale = np.where(too_small, np.nextafter(scale, np.float16(np.inf)), scale)
        scale = scale.astype(F32) / F32(1024)
        with np.errstate(divide="ignore"):
            inverse = np.where(largest < TINY, F32(0), F32(1) / scale)
        return np.rint(weight * inverse[..., None]).astype(np.int64), scale

    def weights_as_kept(self, weight):
        """[out, in] floats that the integers and scales stand for."""
        integers, scale = self.pack_weights(weight)
        kept = integers.astype(F32) * scale[..., None]
        return kept.reshape(len(weight), -1)[:, : weight.shape[1]]

    def product(self, x, weight, bias):
        """[T, out]: group after group, sums of integers times the rows' scales, times the weights', added."""
        a, input_scale = self.pack_inputs(x)
        b, weight_scale = self.pack_weights(weight)
        y = np.broadcast_to(bias, (len(x), len(weight))).astype(F32)
        for g in range(a.shape[1]):
            dots = a[:, g] @ b[:, g].T
            assert np.abs(dots).max(initial=0) < 2**31, "more than the kernels can hold"
            # The kernels keep the factor 1024 of the weights' scales, and take it out of the rows'.
            rows = dots.astype(F32) * (input_scale[:, g, None] / F32(1024))
            y = fma(rows, weight_scale[:, g] * F32(1024), y)
        return y


ORACLES = {
    "w16": Oracle(group=128, weight_max=2047, input_max=8191),
    "w8": Oracle(group=32, weight_max=127, input_max=127),
}
