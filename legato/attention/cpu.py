"""proto"""

import math, torch, numba, numpy as np
from legato.attention.base import *
from legato.attention import cpu_kernel as K, cpu_plan as P

E_ = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def rows(t):
    s = t.element_size()
    return K.Rows(t.data_ptr(), t.stride(0) * s, t.stride(1) * s)


class CpuAttention:
    name = "cpu"

    def __init__(self, progress=print):
        numba.config.THREADING_LAYER = "omp"
        K.store.enable_caching()
        K.attend.enable_caching()
        P.cut.enable_caching()

    def __call__(self, q, k, v, cache, batch, params):
        n, h, d = q.shape
        g = k.shape[1]
        workers = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        numba.set_num_threads(workers)
        keys = cache.keys.view(-1, g, d)
        values = cache.values.view(-1, g, d)
        k = k.to(keys.dtype)
        v = v.to(keys.dtype)
        out = torch.empty(n, h, d)
        w = params.window or 2**30
        tiles, items, fl = P.cut(
            batch.query_start.numpy(),
            batch.start.numpy(),
            w,
            P.Shape(g, h // g, d, K.TILE_ROWS, K.PART, workers),
        )
        c = params.softcap
        l2 = math.log2(math.e)
        factor, cap = (params.scale * l2, 0.0) if c is None else (2 * l2 * params.scale / c, c * l2)
        sz = K.Sizes(g, h // g, d, cache.keys.shape[1], E_[keys.dtype])
        K.store(rows(k), rows(v), rows(keys), rows(values), batch.slots.numpy(), sz, workers)
        K.attend(
            rows(q),
            rows(out),
            rows(keys),
            rows(values),
            batch.block_table.numpy(),
            tiles,
            items,
            fl,
            sz,
            factor,
            cap,
            w,
            workers,
        )
        return out
