"""The attention back end's protocol, and the two things it is handed: the step's layout and a layer's cache.

Shape legend: T tokens of the step, S sequences, H query heads, G key-value heads, D head size, N blocks in
the pool, B block size, W the widest block table of the step.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Paged keys and values of one layer."""

    keys: Tensor  # [N, B, G, D]
    values: Tensor  # [N, B, G, D]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the step's tokens sit. Built once a step and shared by all layers.

    Sequence s owns rows query_start[s] .. query_start[s + 1] of the step; its first row is at absolute
    position start[s], so its row i attends to positions 0 .. start[s] + i.
    """

    query_start: Tensor  # [S + 1] int32, on the host
    start: Tensor  # [S] int32, on the host
    block_table: Tensor  # [S, W] int32, on the device; padded with 0
    slots: Tensor  # [T] int64, on the device: block * B + offset, where each row's K and V are stored


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer's attention computes: softmax(softcap(scale q k^T) + mask) v."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionBackend(Protocol):
    """Writes the step's K, V into the cache, then attends over the cache.

    Calls of one step come layer by layer with the same `batch`. Implementations hold no per-step state.
    """

    name: str

    def __call__(
        self,
        q: Tensor,  # [T, H, D], rotated
        k: Tensor,  # [T, G, D], rotated
        v: Tensor,  # [T, G, D]
        cache: LayerCache,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> Tensor:  # [T, H, D]
        """Attend each row to its own sequence's positions up to itself (within the window)."""
        ...
