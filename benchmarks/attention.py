"""How fast the CPU's attention is, beside torch's on keys and values that are already gathered.

    python -m benchmarks.attention --json

One row for each kind, number of query rows and context. The rows of a chunk are one sequence's last, those of
a decode are sequences of their own. `gflops` counts what the rows see, `gb_s` the keys and values that lie in
the cache, each once. `sdpa_ratio` is the rate over that of `scaled_dot_product_attention` with the same mask,
in fp32, with the same threads; runs of the two alternate, and times are medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional as F

from legato.attention.base import AttentionBatch, AttentionParams, LayerCache
from legato.attention.cpu import CpuAttention

BLOCK = 32
SHAPES = ((256, 4, 1), (128, 12, 2))
"""Head size, query heads, key-value heads."""
CHUNKS = ((64, 512), (128, 512), (256, 1024), (512, 512), (512, 2048))
DECODES = ((1, 512), (4, 512), (16, 512), (1, 2048), (4, 2048), (16, 2048), (1, 16384), (4, 16384))
"""Rows and context."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured case."""

    kind: str
    head_dim: int
    heads: int
    kv_heads: int
    kv_dtype: str
    rows: int
    context: int
    milliseconds: float
    gflops: float
    gb_s: float
    sdpa_ratio: float


class Case:
    """Sequences of `count` new rows each, the last of `context` positions in scattered blocks."""

    def __init__(
        self, shape: tuple[int, int, int], num_seqs: int, count: int, context: int, dtype: str
    ) -> None:
        self.dim, self.heads, self.kv_heads = shape
        self.num_seqs, self.count, self.context = num_seqs, count, context
        torch.manual_seed(0)
        width = context // BLOCK
        table = torch.randperm(num_seqs * width).view(num_seqs, width).int()
        pool = (num_seqs * width, BLOCK, self.kv_heads, self.dim)
        self.cache = LayerCache(*(torch.randn(pool).to(DTYPES[dtype]) for _ in range(2)))
        positions = torch.arange(context - count, context)
        slots = table[:, positions // BLOCK].long() * BLOCK + positions % BLOCK
        self.batch = AttentionBatch(
            query_start=(torch.arange(num_seqs + 1) * count).int(),
            start=torch.full((num_seqs,), context - count, dtype=torch.int32),
            block_table=table,
            slots=slots.flatten(),
        )
        qkv = torch.randn(num_seqs * count, self.heads + 2 * self.kv_heads, self.dim)
        self.q, self.k, self.v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        # [num_seqs, heads, rows or positions, D]: what torch's attention reads
        self.keys, self.values = (
            pool[table.long()].flatten(1, 2).transpose(1, 2).float().contiguous()
            for pool in (self.cache.keys, self.cache.values)
        )
        self.queries = self.q.view(num_seqs, count, self.heads, self.dim).transpose(1, 2).contiguous()
        self.mask = torch.ones(count, context, dtype=torch.bool).tril(context - count)
        self.scale = self.dim**-0.5

    def ours(self, attention: CpuAttention) -> Callable[[], object]:
        params = AttentionParams(scale=self.scale)
        return lambda: attention(self.q, self.k, self.v, self.cache, self.batch, params)

    def sdpa(self) -> Callable[[], object]:
        return lambda: F.scaled_dot_product_attention(
            self.queries, self.keys, self.values, attn_mask=self.mask, scale=self.scale, enable_gqa=True
        )

    @property
    def flops(self) -> float:
        seen = self.count * (self.context - self.count) + self.count * (self.count + 1) / 2
        return 4.0 * self.num_seqs * self.heads * self.dim * seen

    @property
    def bytes_read(self) -> int:
        return 2 * self.cache.keys.nbytes


def medians(runs: list[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of each; the runs alternate, so that a disturbance meets all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(repeats):
        for run, seconds in zip(runs, times, strict=True):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in times]


def measure(
    attention: CpuAttention,
    kind: str,
    shape: tuple[int, int, int],
    rows: int,
    context: int,
    dtype: str,
    repeats: int,
) -> Result:
    case = Case(shape, rows, 1, context, dtype) if kind == "decode" else Case(shape, 1, rows, context, dtype)
    ours, theirs = medians([case.ours(attention), case.sdpa()], repeats)
    return Result(
        kind=kind,
        head_dim=case.dim,
        heads=case.heads,
        kv_heads=case.kv_heads,
        kv_dtype=dtype,
        rows=rows,
        context=context,
        milliseconds=round(1e3 * ours, 4),
        gflops=round(case.flops / ours / 1e9, 1),
        gb_s=round(case.bytes_read / ours / 1e9, 1),
        sdpa_ratio=round(theirs / ours, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--kv-dtype", choices=sorted(DTYPES), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    attention = CpuAttention()
    for shape in SHAPES:
        for kind, cases in (("chunk", CHUNKS), ("decode", DECODES)):
            for rows, context in cases:
                result = measure(attention, kind, shape, rows, context, options.kv_dtype, options.repeats)
                print(json.dumps(asdict(result)) if options.json else result)


if __name__ == "__main__":
    main()
