"""What a layer is made of besides attention, behind one small protocol, and all of it in plain PyTorch.

A projection is a linear layer with what always comes right before it (a norm) and right after (the gate of
an MLP, or a norm and the residual stream): a back end may do these while it has the row at hand. The decoder
says what a layer computes, and never knows how.

Shape legend: T rows of a step, N heads, D head size, V vocabulary, E hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from legato.models.linear import DenseLinear, LinearFactory
from legato.models.rope import rotate
from legato.models.spec import Activation


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension (Zhang and Sennrich 2019)."""

    gain: Tensor  # fp32: they are small, and Gemma's lose digits in bf16
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Computed in fp32 up to the cast."""
        return (F.rms_norm(x.float(), x.shape[-1:], eps=self.eps) * self.gain).to(x.dtype)


After = Norm | Activation | None
"""What is done to each row of results: a norm; or, as a gate, activation(first half) * second half."""


class Projection(Protocol):
    """y = after(W before(x) + b) for all rows of a step at once."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], or half of that after a gate."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual [T, out] += y"""
        ...


Lookup = Callable[[Tensor], Tensor]
"""Token ids [T] -> embeddings [T, E], scaled."""


class LayerOps(Protocol):
    """One way to compute layers. Takes weights as it builds; may keep them in a form of its own."""

    def projection(
        self, weight: Tensor, bias: Tensor | None = None, *, before: Norm | None = None, after: After = None
    ) -> Projection:
        """`weight` [out, in] and `bias` [out] of any float type."""
        ...

    def head(self, weight: Tensor, before: Norm) -> Projection:
        """The LM head. Its results may be overwritten by its next call."""
        ...

    def embedding(self, weight: Tensor, scale: float, head: Projection | None) -> Lookup:
        """Rows of `weight` [V, E] times `scale`. `head`: the projection of the same matrix, if it is tied."""
        ...

    def rope(self, qkv: Tensor, num: int, angles: tuple[Tensor, Tensor], norm: Norm | None) -> Tensor:
        """The first `num` heads of `qkv` [T, N, D], normalized and rotated. `qkv` may be overwritten.

        `angles` are cos and sin, [T, D / 2] each. `norm` has a gain for each head, [num, D].
        """
        ...


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class TorchProjection:
    """A projection around any linear layer, on any device."""

    def __init__(
        self, linear: LinearFactory, weight: Tensor, bias: Tensor | None, before: Norm | None, after: After
    ) -> None:
        self._linear = linear(weight, bias)
        self._before = before
        self._after = after

    def __call__(self, x: Tensor) -> Tensor:
        y = self._linear(x if self._before is None else self._before(x))
        match self._after:
            case None:
                return y
            case Norm() as norm:
                return norm(y)
            case activation:
                gate, other = y.chunk(2, dim=-1)
                return _ACTIVATIONS[activation](gate) * other

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual += self(x)


class TorchOps:
    """Everything in PyTorch."""

    def __init__(
        self, linear: LinearFactory = DenseLinear, *, embedding_dtype: torch.dtype | None = None
    ) -> None:
        """The embedding matrix is kept as `embedding_dtype`, or as it is."""
        self._linear = linear
        self._embedding_dtype = embedding_dtype

    def projection(
        self, weight: Tensor, bias: Tensor | None = None, *, before: Norm | None = None, after: After = None
    ) -> Projection:
        return TorchProjection(self._linear, weight, bias, before, after)

    def head(self, weight: Tensor, before: Norm) -> Projection:
        return self.projection(weight, before=before)

    def embedding(self, weight: Tensor, scale: float, head: Projection | None) -> Lookup:  # noqa: ARG002
        dtype = weight.dtype
        kept = weight.to(self._embedding_dtype or dtype)
        return lambda ids: F.embedding(ids, kept).to(dtype) * scale

    def rope(self, qkv: Tensor, num: int, angles: tuple[Tensor, Tensor], norm: Norm | None) -> Tensor:
        qk = qkv[:, :num]
        return rotate(qk if norm is None else norm(qk), *angles)
