"""The reference attention against PyTorch's own on gathered keys and values, over random layouts."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from legato.attention.base import AttentionBatch, AttentionParams, LayerCache
from legato.attention.reference import ReferenceAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sequences as (positions already computed, rows of this step), and the sizes of heads and blocks."""

    runs: tuple[tuple[int, int], ...]
    block_size: int
    kv_heads: int
    ratio: int
    head_dim: int
    window: int | None
    seed: int


layouts = st.builds(
    Layout,
    runs=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=4).map(tuple),
    block_size=st.sampled_from([1, 3, 4, 16]),
    kv_heads=st.integers(1, 3),
    ratio=st.integers(1, 4),
    head_dim=st.sampled_from([2, 5, 8]),
    window=st.none() | st.integers(1, 30),
    seed=st.integers(0, 2**20),
)


class Scene:
    """Random q, K and V of whole sequences; what is past lies in scattered blocks, the rest is to be done."""

    def __init__(self, layout: Layout) -> None:
        generator = torch.Generator().manual_seed(layout.seed)
        ends = [start + count for start, count in layout.runs]
        heads = layout.kv_heads * layout.ratio
        self.layout = layout
        # keys, values: one [length, G, D] for each sequence
        self.keys, self.values = (
            [torch.randn(end, layout.kv_heads, layout.head_dim, generator=generator) for end in ends]
            for _ in range(2)
        )
        self.queries = [
            torch.randn(count, heads, layout.head_dim, generator=generator) for _, count in layout.runs
        ]
        widths = [-(-end // layout.block_size) for end in ends]
        # Block 0 pads the tables and is nobody's.
        blocks = (1 + torch.randperm(sum(widths), generator=generator)).split(widths)
        shape = (1 + sum(widths), layout.block_size, layout.kv_heads, layout.head_dim)
        self.cache = LayerCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        slots = [
            (table[:, None] * layout.block_size + torch.arange(layout.block_size)).flatten()[:end]
            for table, end in zip(blocks, ends, strict=True)
        ]
        for seq, (start, _) in enumerate(layout.runs):
            self._flat(self.cache.keys)[slots[seq][:start]] = self.keys[seq][:start]
            self._flat(self.cache.values)[slots[seq][:start]] = self.values[seq][:start]
        table = torch.zeros(len(ends), max(widths), dtype=torch.int32)
        for seq, row in enumerate(blocks):
            table[seq, : len(row)] = row
        self.slots = slots
        self.batch = AttentionBatch(
            query_start=torch.tensor([0, *(count for _, count in layout.runs)]).cumsum(0).int(),
            start=torch.tensor([start for start, _ in layout.runs], dtype=torch.int32),
            block_table=table,
            slots=self._new(slots),
        )

    def _flat(self, pool):
        return pool.view(-1, *pool.shape[2:])

    def _new(self, whole):
        """The rows of this step, of all sequences one after another."""
        return torch.cat([rows[start:] for rows, (start, _) in zip(whole, self.layout.runs, strict=True)])

    def attend(self, params):
        """[T, H, D]"""
        q, k, v = torch.cat(self.queries), self._new(self.keys), self._new(self.values)
        return ReferenceAttention()(q, k, v, self.cache, self.batch, params)

    def mask(self, seq):
        start, count = self.layout.runs[seq]
        rows, keys = torch.arange(start, start + count)[:, None], torch.arange(start + count)
        window = self.layout.window or start + count
        return (keys <= rows) & (rows - keys < window)


@given(layouts)
@settings(max_examples=150, deadline=None)
def test_any_layout_agrees_with_torch_attention_on_gathered_keys_and_values(layout):
    """E-01: the mask is per row, so chunks, windows and blocks of any size give the same."""
    scene = Scene(layout)
    ours = scene.attend(AttentionParams(scale=0.7, window=layout.window)).split([n for _, n in layout.runs])
    for seq, out in enumerate(ours):
        expected = F.scaled_dot_product_attention(
            scene.queries[seq].transpose(0, 1),
            scene.keys[seq].repeat_interleave(layout.ratio, dim=1).transpose(0, 1),
            scene.values[seq].repeat_interleave(layout.ratio, dim=1).transpose(0, 1),
            attn_mask=scene.mask(seq),
            scale=0.7,
        ).transpose(0, 1)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@given(layouts, st.sampled_from([0.5, 5.0]))
@settings(max_examples=50, deadline=None)
def test_the_soft_cap_is_applied_to_scaled_scores_before_the_mask(layout, cap):
    """Head by head and row by row, straight from the formula."""
    scene = Scene(layout)
    ours = scene.attend(AttentionParams(scale=0.7, window=layout.window, softcap=cap))
    expected = []
    for seq, (_, count) in enumerate(layout.runs):
        visible = scene.mask(seq)
        for row in range(count):
            for head in range(layout.kv_heads * layout.ratio):
                keys = scene.keys[seq][visible[row], head // layout.ratio]
                values = scene.values[seq][visible[row], head // layout.ratio]
                scores = cap * torch.tanh(0.7 * keys @ scene.queries[seq][row, head] / cap)
                expected.append(scores.exp() / scores.exp().sum() @ values)
    torch.testing.assert_close(ours.flatten(0, 1), torch.stack(expected), rtol=1e-4, atol=1e-5)


@given(layouts)
@settings(max_examples=50, deadline=None)
def test_keys_and_values_are_written_at_their_slots_and_nowhere_else(layout):
    scene = Scene(layout)
    scene.attend(AttentionParams(scale=1.0))
    for pool, whole in ((scene.cache.keys, scene.keys), (scene.cache.values, scene.values)):
        flat = scene._flat(pool)
        for seq, rows in enumerate(whole):
            assert torch.equal(flat[scene.slots[seq]], rows)
        others = torch.ones(len(flat), dtype=torch.bool)
        others[torch.cat(scene.slots)] = False
        assert flat[others].isnan().all()


def test_blocks_behind_the_window_are_not_read():
    """Their memory may belong to another sequence by then."""
    # The first row, at position 30, sees 24 .. 30: blocks 0 .. 5 are behind it.
    layout = Layout(runs=((30, 4),), block_size=4, kv_heads=1, ratio=2, head_dim=4, window=7, seed=0)
    params = AttentionParams(scale=1.0, window=7)
    expected = Scene(layout).attend(params)
    scene = Scene(layout)
    scene.batch.block_table[0, :6] = 10**6  # no such block
    assert torch.equal(scene.attend(params), expected)


def test_a_cache_of_another_type_is_read_as_it_was_stored():
    layout = Layout(runs=((0, 9),), block_size=4, kv_heads=2, ratio=2, head_dim=8, window=None, seed=3)
    scene = Scene(layout)
    exact = scene.attend(AttentionParams(scale=0.35))
    scene.cache = LayerCache(scene.cache.keys.half(), scene.cache.values.half())
    rounded = scene.attend(AttentionParams(scale=0.35))
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0, atol=5e-3)


def test_a_pool_that_is_not_one_piece_of_memory_is_refused_and_not_lost():
    layout = Layout(runs=((0, 3),), block_size=4, kv_heads=2, ratio=1, head_dim=8, window=None, seed=3)
    scene = Scene(layout)
    scattered = scene.cache.keys.transpose(0, 1).contiguous().transpose(0, 1)
    scene.cache = LayerCache(scattered, scattered)
    with pytest.raises(RuntimeError, match="view"):
        scene.attend(AttentionParams(scale=1.0))
