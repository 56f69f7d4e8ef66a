"""Linear layers for x86 CPUs with 16-bit floats, over FBGEMM: a row's bits never depend on its batch.

FBGEMM works on tiles of rows, and on some processors a row in an incomplete tile is summed in another order;
so rows are padded to whole tiles, and how many rows a tile has is measured, not assumed (`row_tile`).

The operator is old, could move, and exists without working on some processors: `obstacle` finds out.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

PACK_ROWS = 32_768
"""FBGEMM packs larger matrices several times slower per row (its reads then miss every cache)."""


def obstacle() -> str | None:
    """Why these layers do not work here, in words; None if they do. Tries a small product."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 64, generator=generator) for n in (48, 5))
    try:
        y = Fp16Linear(weight)(x)
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
