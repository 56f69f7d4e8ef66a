"""The tensors that hold keys and values. Does not know who owns a block, nor how many there should be."""

import torch

from legato.attention.base import LayerCache
from legato.errors import ConfigError
from legato.models.spec import ModelSpec


class KVCache:
    """Paged keys and values of every layer: `num_blocks` blocks of `block_size` positions.

    All of it is filled with zeros here, so the memory is really taken: what does not fit fails at start-up
    and not under load. Zeros also matter to attention that reads a block's unused end: it masks with a
    weight of 0, and 0 times a stray NaN would be NaN.
    """

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ConfigError when the device cannot give the memory."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        try:
            self.layers = tuple(
                LayerCache(
                    keys=torch.zeros(shape, dtype=dtype, device=device),
                    values=torch.zeros(shape, dtype=dtype, device=device),
                )
                for _ in range(spec.num_layers)
            )
        except (RuntimeError, MemoryError) as error:
            size = num_blocks * block_bytes(spec, block_size=block_size, dtype=dtype)
            raise ConfigError(
                f"KV cache: {device} cannot give {size} bytes for {num_blocks} blocks"
            ) from error


def block_bytes(spec: ModelSpec, *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block's keys and values over all layers."""
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
