"""Linear layers for x86 CPUs, over the quantized kernels in PyTorch. A row's bits never depend on its batch.

`Fp16Linear` keeps weights as 16-bit floats packed for FBGEMM and computes in fp32. FBGEMM works on tiles of
rows, and on some processors a row in an incomplete tile is summed in another order; so rows are padded to
whole tiles, and how many rows a tile has is measured, not assumed (`row_tile`).

`Int8Linear` keeps weights as 8-bit integers, one scale for each output. A row of activations becomes 14-bit
integers with one scale, split in two 7-bit halves that are stacked as rows of one integer product: the
weights are read once for both, 7 bits keep the kernels of processors without VNNI from saturating, and
integer sums are exact in any order.

The operators are old, could move, and exist without working on some processors: `obstacle` finds out.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from legato.models.linear import LinearFactory

PACK_ROWS = 32_768
"""FBGEMM packs larger matrices several times slower per row (its reads then miss every cache)."""
HALF, FULL = 64, 128 * 63 - 1
"""Halves are -64 .. 63; a row's largest activation becomes 8063, whose upper half is 63."""


def obstacle(kind: LinearFactory) -> str | None:
    """Why layers of this kind do not work here, in words; None if they do. Tries a small product."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 64, generator=generator) for n in (48, 5))
    try:
        y = kind(weight, None)(x)
    except (AttributeError, RuntimeError) as error:  # the operator is gone, or this processor has no kernel
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    exact = F.linear(x, weight)
    if not torch.allclose(y, exact, rtol=0.02, atol=0.02 * float(exact.abs().max())):
        return "a test product came out wrong"
    return None


class Fp16Linear:
    """y = x W^T + b with W in fp16 and everything else in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` [out, in] of any float type, finite in fp16; it is not kept."""
        self._bias = bias
        self._tile = row_tile(weight.shape[1])
        self._packed = [
            torch.ops.quantized.linear_prepack_fp16(rows.float().contiguous(), None)
            for rows in torch.split(weight, PACK_ROWS)
        ]

    def __call__(self, x: Tensor) -> Tensor:  # [M, in] fp32 -> [M, out] fp32
        num_rows = len(x)
        x = F.pad(x, (0, 0, 0, -num_rows % self._tile))
        parts: list[Tensor] = [torch.ops.quantized.linear_dynamic_fp16(x, part) for part in self._packed]
        y = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:num_rows]
        return y if self._bias is None else y + self._bias


class Int8Linear:
    """y = x W^T + b with W in int8 and x in 14 bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` [out, in] of any float type; it is not kept."""
        self._bias = bias
        scale = weight.abs().amax(dim=1).float().clamp(min=torch.finfo(torch.float32).tiny) / 127
        rows = zip(torch.split(weight, PACK_ROWS), torch.split(scale, PACK_ROWS), strict=True)
        quantized = torch.cat([_rounded(*part) for part in rows])
        self._scale = scale
        self._zero = torch.zeros(len(weight), dtype=torch.int32)
        self._packed = torch.ops.onednn.qlinear_prepack(quantized, None)

    def __call__(self, x: Tensor) -> Tensor:  # [M, in] fp32 -> [M, out] fp32
        num_rows = len(x)
        halves, scale = split_rows(x)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            halves,
            1.0,
            HALF,
            self._packed,
            self._scale,
            self._zero,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        y = torch.add(y[num_rows:], y[:num_rows], alpha=2 * HALF).mul_(scale)
        return y if self._bias is None else y.add_(self._bias)


def split_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] as 14-bit integers: uint8 halves [2 M, K], the upper ones first, and scales [M, 1].

    x is about scale * (128 * (upper - 64) + (lower - 64)).
    """
    scale = torch.linalg.vector_norm(x, ord=math.inf, dim=1, keepdim=True).div_(FULL)
    scale.clamp_(min=torch.finfo(torch.float32).tiny)
    whole = torch.div(x, scale).round_()
    upper = torch.add(whole, HALF).div_(2 * HALF).floor_()
    lower = whole.sub_(upper, alpha=2 * HALF)
    return torch.cat((upper, lower)).add_(HALF).to(torch.uint8), scale


def _rounded(weight: Tensor, scale: Tensor) -> Tensor:
    return torch.div(weight.float(), scale.unsqueeze(1)).round_().to(torch.int8)


@lru_cache(maxsize=64)
def row_tile(num_inputs: int) -> int:
    """The fewest rows whose multiples FBGEMM computes without a row depending on its neighbours.

    Measured on this processor with a matrix of `num_inputs` columns: 6 on AVX2, 1 on AVX-512 as far as seen.
    Raises RuntimeError if none of the candidates holds; then fp16 cannot be exact here.
    """
    generator = torch.Generator().manual_seed(0)
    packed = torch.ops.quantized.linear_prepack_fp16(torch.randn(192, num_inputs, generator=generator), None)
    x = torch.randn(84, num_inputs, generator=generator)

    def bits(num_rows: int) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x[:num_rows].contiguous(), packed)
        return y

    whole = bits(84)
    for tile in (1, 2, 4, 6, 12, 14, 28):
        if all(torch.equal(bits(n), whole[:n]) for n in range(tile, 84, tile)):
            return tile
    raise RuntimeError("no row tile makes FBGEMM's fp16 product independent of the batch")
