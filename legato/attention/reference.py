"""Attention over paged keys and values in plain PyTorch: the oracle that other back ends must agree with.

It says what attention means here, one sequence at a time, on any device. It knows nothing of requests, chunks
or decodes: a sequence is some rows that follow the positions already in its blocks.

Shape legend: see `attention/base.py`; here also n rows of one sequence, L positions that they can see,
R = H / G query heads on one key-value head.
"""

import torch
from torch import Tensor

from legato.attention.base import AttentionBatch, AttentionParams, LayerCache


class ReferenceAttention:
    """softmax(softcap(scale q k^T) + mask) v in fp32, row by row of the mask's definition."""

    name = "reference"

    def __call__(
        self,
        q: Tensor,  # [T, H, D], rotated
        k: Tensor,  # [T, G, D], rotated
        v: Tensor,  # [T, G, D]
        cache: LayerCache,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> Tensor:  # [T, H, D]
        """Store the step's K, V, then attend each row to its own sequence's positions up to itself."""
        _store(k, cache.keys, batch.slots)
        _store(v, cache.values, batch.slots)
        out = torch.empty_like(q)
        bounds: list[int] = batch.query_start.tolist()
        for seq, start in enumerate(batch.start.tolist()):
            rows = slice(bounds[seq], bounds[seq + 1])
            end = start + rows.stop - rows.start
            # The first row sees furthest back; no row of the run sees anything before `first`.
            first = 0 if params.window is None else max(0, start - params.window + 1)
            table = batch.block_table[seq]
            keys = _gather(cache.keys, table, first, end)
            values = _gather(cache.values, table, first, end)
            mask = _visible(start, first, end, params.window, q.device)
            out[rows] = _attend(q[rows], keys, values, mask, params)
        return out


def _store(new: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Write new [T, G, D] at `slots` [T] of pool [N, B, G, D]."""
    # view, not reshape: a pool that cannot be viewed this way would be copied and the write lost.
    pool.view(-1, *pool.shape[2:])[slots] = new.to(pool.dtype)


def _gather(pool: Tensor, table: Tensor, first: int, end: int) -> Tensor:
    """Positions first .. end - 1 of one sequence from pool [N, B, G, D], as [L, G, D] in fp32."""
    block_size = pool.shape[1]
    first_block, end_block = first // block_size, -(-end // block_size)
    blocks = pool[table[first_block:end_block]].flatten(0, 1)
    offset = first_block * block_size
    # What lies beyond `end` in the last block was never written and may be NaN, so it is cut, not masked.
    return blocks[first - offset : end - offset].float()


def _visible(start: int, first: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """[n, L]: whether the row at position p sees key position j: j <= p, and j > p - window."""
    rows = torch.arange(start, end, device=device).unsqueeze(1)
    keys = torch.arange(first, end, device=device)
    seen = keys <= rows
    return seen if window is None else seen & (keys > rows - window)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """q [n, H, D] over keys, values [L, G, D] -> [n, H, D]; query head h reads key-value head h // R."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    grouped = q.float().reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)  # [n, G, R, D]
    scores = params.scale * torch.einsum("ngrd,lgd->grnl", grouped, keys)
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return torch.einsum("grnl,lgd->ngrd", weights, values).flatten(1, 2).to(q.dtype)
