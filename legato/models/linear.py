"""Linear layers behind one small protocol, so that the decoder never knows how a matrix is stored.

A faster product is another `LinearFactory`; it may keep the weight in its own form and drop the tensor that
it was given.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Linear(Protocol):
    """y = x W^T + b for all rows of a step at once."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], in x's dtype."""
        ...


LinearFactory = Callable[[Tensor, Tensor | None], Linear]
"""(weight [out, in], bias [out] or None) -> the layer."""


class DenseLinear:
    """The weight as it is, multiplied by PyTorch. Shares the storage of the tensor that it was given."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)
