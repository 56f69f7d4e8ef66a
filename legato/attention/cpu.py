"""Attention over paged keys and values on CPUs: nothing is gathered, and the same row gives the same bits.

The output of a query row depends on its query and on the keys and values that it sees, not on the chunk, the
batch, the blocks or the number of threads that it is computed with. Knows tensors, and no arithmetic: that is
in `kernels/`.

Shape legend: see `attention/base.py`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from legato.attention.base import AttentionBatch, AttentionParams, LayerCache
from legato.errors import ConfigError
from legato.kernels.attention import Rows, Step, attend_kernel
from legato.kernels.attention_vector import BFLOAT16, FLOAT16, FLOAT32
from legato.kernels.cache import preparing
from legato.kernels.thread_pool import ThreadPool
from legato.kernels.vector import LANES, fuses_multiply_add

_ELEMENTS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_NO_WINDOW = 1 << 30
_LOG2_E = math.log2(math.e)


class CpuAttention:
    """softmax(softcap(scale q k^T) + mask) v in fp32. Keys and values may be stored in 16 bits."""

    name = "cpu"

    def __init__(
        self,
        threads: ThreadPool | None = None,
        *,
        head_dim: int = LANES,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Compile for any model and batch, which takes seconds, or load what an earlier start compiled.

        `threads`: as many as torch has if not told.

        Raises ConfigError where only `ReferenceAttention` works: for a head size that is no multiple of 16,
        and on a machine without fused multiply-add.
        """
        if head_dim % LANES:
            raise ConfigError(f"cpu attention: head size {head_dim} is not a multiple of {LANES}")
        if not fuses_multiply_add():
            raise ConfigError("cpu attention: this processor has no fused multiply-add")
        self._threads = threads or ThreadPool(torch.get_num_threads())
        with preparing("attention", progress):
            self.kernel = attend_kernel()
            self._attend_to_one_token(head_dim)
        self.kernel.close()

    def __call__(
        self,
        q: Tensor,  # [T, H, D], rotated
        k: Tensor,  # [T, G, D], rotated
        v: Tensor,  # [T, G, D]
        cache: LayerCache,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> Tensor:  # [T, H, D]
        """Store the step's K, V, rounded to nearest, then attend each row to its sequence up to itself."""
        num_heads, dim = q.shape[1:]
        assert dim % LANES == 0, "the constructor would have refused this head size"
        kv_heads = k.shape[1]
        dtype = cache.keys.dtype
        # view, not reshape: a pool that cannot be viewed this way would be copied and the write lost.
        keys, values = (pool.view(-1, kv_heads, dim) for pool in (cache.keys, cache.values))
        out = torch.empty(q.shape, dtype=torch.float32)
        # Named, so that what their addresses lead to lives as long as the call.
        tensors = (q.float(), k.to(dtype), v.to(dtype), out, keys, values)
        # The kernel computes powers of 2; under a cap it takes 2 log2(e) times what goes into tanh.
        cap = params.softcap
        step = Step(
            query_start=batch.query_start.numpy(),
            start=batch.start.numpy(),
            block_table=batch.block_table.numpy(),
            slots=batch.slots.numpy(),
            kv_heads=kv_heads,
            ratio=num_heads // kv_heads,
            dim=dim,
            block_size=cache.keys.shape[1],
            element=_ELEMENTS[dtype],
            window=_NO_WINDOW if params.window is None else params.window,
            factor=params.scale * _LOG2_E * (1.0 if cap is None else 2.0 / cap),
            cap=0.0 if cap is None else cap * _LOG2_E,
        )
        handle = self._threads.handle(torch.get_num_threads())
        self.kernel(handle, step, *(_rows(tensor) for tensor in tensors))
        return out.to(q.dtype)

    def _attend_to_one_token(self, head_dim: int) -> None:
        pool = torch.zeros(1, 1, 1, head_dim)
        zero = torch.zeros(1, dtype=torch.int32)
        batch = AttentionBatch(
            query_start=torch.arange(2, dtype=torch.int32),
            start=zero,
            block_table=zero[None],
            slots=zero.long(),
        )
        self(pool[0], pool[0], pool[0], LayerCache(pool, pool.clone()), batch, AttentionParams(scale=1.0))


def _rows(tensor: Tensor) -> Rows:
    """[rows, heads, D] with elements side by side."""
    size = tensor.element_size()
    return Rows(tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(1) * size)
