"""The CPU back end: right within fp32's rounding, and the same bits however the work is laid out."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from legato.attention.base import AttentionBatch, AttentionParams, LayerCache
from legato.attention.cpu import CpuAttention
from legato.attention.reference import ReferenceAttention
from legato.errors import ConfigError
from legato.kernels.thread_pool import ThreadPool
from legato.kernels.vector import has_wide_registers

Schedule = list[list[tuple[int, int]]]
"""Of each step, in the order of the batch: which sequences, and how many of their next positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One layer's attention."""

    kv_heads: int
    ratio: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None

    @property
    def params(self):
        return AttentionParams(scale=self.head_dim**-0.5, window=self.window, softcap=self.softcap)


models = st.builds(
    Model,
    kv_heads=st.integers(1, 3),
    ratio=st.integers(1, 8),
    head_dim=st.sampled_from([16, 48, 64, 80]),
    window=st.none() | st.integers(1, 300),
    softcap=st.none() | st.sampled_from([0.5, 5.0, 50.0]),
)
# Lengths on both sides of the parts' bounds, which lie at multiples of 128.
lengths = st.lists(st.integers(1, 60) | st.integers(120, 400), min_size=1, max_size=4)
block_sizes = st.sampled_from([1, 3, 8, 16, 32, 100, 128])
seeds = st.integers(0, 2**20)


class Story:
    """Random q, k, v of whole sequences, to be computed by any schedule in any blocks."""

    def __init__(self, model, sequence_lengths, seed):
        generator = torch.Generator().manual_seed(seed)
        self.model = model
        self.heads = [model.kv_heads * model.ratio, model.kv_heads, model.kv_heads]
        self.qkv = [
            torch.randn(length, sum(self.heads), model.head_dim, generator=generator)
            for length in sequence_lengths
        ]

    def whole(self, seq) -> Schedule:
        return [[(seq, len(self.qkv[seq]))]]

    def tokens(self, seq) -> Schedule:
        return [[(seq, 1)]] * len(self.qkv[seq])

    def shuffled(self, seed) -> Schedule:
        """Chunks of all sizes and single rows, with other sequences before and behind."""
        draw, left = random.Random(seed), dict(enumerate(len(qkv) for qkv in self.qkv))
        steps = []
        while left:
            step = []
            for seq in draw.sample(list(left), draw.randint(1, len(left))):
                count = min(left[seq], draw.choice([1, 1, 2, draw.randint(3, 40), draw.randint(41, 300)]))
                step.append((seq, count))
                left[seq] -= count
                if not left[seq]:
                    del left[seq]
            steps.append(step)
        return steps

    @torch.inference_mode()  # as the decoder runs it
    def run(self, attention, schedule, *, block_size=16, seed=0, dtype=torch.float32):
        """The output of every row of each sequence in the schedule, and the cache at the end."""
        generator = torch.Generator().manual_seed(seed)
        lengths = [len(qkv) for qkv in self.qkv]
        width = -(-max(lengths) // block_size)
        order = torch.randperm(len(lengths) * width + 1, generator=generator)
        tables = order[1:].view(len(lengths), width)
        shape = (len(order), block_size, self.model.kv_heads, self.model.head_dim)
        # What was never written must not be read.
        cache = LayerCache(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
        done = dict.fromkeys(range(len(lengths)), 0)
        outputs = [torch.full((n, self.heads[0], self.model.head_dim), torch.nan) for n in lengths]
        for step in schedule:
            spans = [(seq, done[seq], done[seq] + count) for seq, count in step]
            q, k, v = torch.cat([self.qkv[seq][a:b] for seq, a, b in spans]).split(self.heads, dim=1)
            out = attention(q, k, v, cache, batch_of(spans, tables, block_size), self.model.params)
            for (seq, a, b), rows in zip(spans, out.split([count for _, count in step]), strict=True):
                outputs[seq][a:b] = rows
                done[seq] = b
        return outputs, cache

    def truth(self, seq, first=0):
        """The rows from `first` on by torch's attention in float64."""
        q, k, v = (x.double().transpose(0, 1) for x in self.qkv[seq].split(self.heads, dim=1))
        keys = torch.arange(q.shape[1])
        rows = keys[first:, None]
        seen = (keys <= rows) & (keys > rows - (self.model.window or len(keys)))
        k, v = k.repeat_interleave(self.model.ratio, dim=0), v.repeat_interleave(self.model.ratio, dim=0)
        return F.scaled_dot_product_attention(q[:, first:], k, v, attn_mask=seen).transpose(0, 1)


def batch_of(spans, tables, block_size):
    positions = [torch.arange(a, b) for _, a, b in spans]
    slots = [
        tables[seq, at // block_size] * block_size + at % block_size
        for (seq, _, _), at in zip(spans, positions, strict=True)
    ]
    return AttentionBatch(
        query_start=torch.tensor([0, *(b - a for _, a, b in spans)]).cumsum(0).int(),
        start=torch.tensor([a for _, a, _ in spans], dtype=torch.int32),
        block_table=tables[[seq for seq, _, _ in spans]].int(),
        slots=torch.cat(slots),
    )


@pytest.fixture(scope="module")
def attention() -> CpuAttention:
    return CpuAttention(ThreadPool(2))


@pytest.fixture(autouse=True)
def _same_number_of_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@given(models.filter(lambda model: model.softcap is None), lengths, block_sizes, seeds)
@settings(max_examples=60, deadline=None)
def test_any_layout_agrees_with_torch_attention_in_double_precision(attention, model, lengths, block, seed):
    story = Story(model, lengths, seed)
    outputs, _ = story.run(attention, story.shuffled(seed), block_size=block, seed=seed)
    for seq, out in enumerate(outputs):
        truth = story.truth(seq)
        assert (out - truth).abs().max() <= 2e-6 * truth.abs().max()


@given(models, lengths, block_sizes, seeds)
@settings(max_examples=60, deadline=None)
def test_any_layout_agrees_with_the_reference(attention, model, lengths, block, seed):
    """E-01 for the soft cap too."""
    story = Story(model, lengths, seed)
    ours, _ = story.run(attention, story.shuffled(seed), block_size=block, seed=seed)
    theirs, _ = story.run(ReferenceAttention(), story.shuffled(seed), block_size=block, seed=seed)
    for out, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@given(models, lengths, block_sizes, seeds, st.integers(1, 2))
@settings(max_examples=100, deadline=None)
def test_no_bit_depends_on_chunks_batch_mates_blocks_or_threads(
    attention, model, lengths, block, seed, threads
):
    """A preempted sequence is one more chunking, in other blocks."""
    story = Story(model, lengths, seed)
    torch.set_num_threads(threads)
    outputs, _ = story.run(attention, story.shuffled(seed), block_size=block, seed=seed)
    torch.set_num_threads(1)
    for seq, out in enumerate(outputs):
        alone, _ = story.run(attention, story.whole(seq))
        assert torch.equal(out, alone[seq])


@pytest.mark.parametrize("window", [None, 1, 100, 200])
@pytest.mark.parametrize("ratio", [1, 4, 7])
def test_rows_one_by_one_give_the_bits_of_one_chunk(attention, window, ratio):
    story = Story(Model(kv_heads=2, ratio=ratio, head_dim=48, window=window), [300], 1)
    decoded, _ = story.run(attention, story.tokens(0), block_size=32)
    chunk, _ = story.run(attention, story.whole(0))
    assert torch.equal(decoded[0], chunk[0])


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_a_long_context_is_exact_and_right(attention, window, softcap):
    """The last rows after 16k positions: alone, when threads share one row's positions, and in a chunk."""
    length, tail = 16_384, 20
    story = Story(Model(kv_heads=1, ratio=4, head_dim=64, window=window, softcap=softcap), [length, 5000], 2)
    early = [(0, length - tail)], [(1, 4000)]
    chunk, _ = story.run(attention, [*early, [(0, tail)]])
    torch.set_num_threads(2)
    decoded, _ = story.run(attention, [*early, *[[(0, 1)]] * tail], block_size=32, seed=3)
    mixed, _ = story.run(attention, [*early, *[[(1, 25), (0, 1)]] * tail], seed=4)
    assert torch.equal(decoded[0], chunk[0])
    assert torch.equal(mixed[0], chunk[0])
    if softcap is None:
        truth = story.truth(0, length - tail)
        assert (chunk[0][-tail:] - truth).abs().max() <= 2e-6 * truth.abs().max()


@given(models, lengths, block_sizes, seeds)
@settings(max_examples=40, deadline=None)
def test_keys_and_values_are_written_at_their_slots_and_nowhere_else(attention, model, lengths, block, seed):
    story = Story(model, lengths, seed)
    _, ours = story.run(attention, story.shuffled(seed), block_size=block, seed=seed)
    _, theirs = story.run(ReferenceAttention(), story.shuffled(seed), block_size=block, seed=seed)
    torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_of_16_bits_gives_the_bits_of_the_rounded_keys_and_values(attention, dtype):
    """Rounded once, when stored, to nearest; computed in fp32 from there."""
    story = Story(Model(kv_heads=2, ratio=3, head_dim=80), [260], 5)
    narrow, cache = story.run(attention, [[(0, 200)], *[[(0, 1)]] * 60], dtype=dtype)
    assert cache.keys.dtype == dtype
    q, k, v = story.qkv[0].split(story.heads, dim=1)
    story.qkv[0] = torch.cat((q, k.to(dtype).float(), v.to(dtype).float()), dim=1)
    wide, _ = story.run(attention, story.whole(0))
    assert torch.equal(narrow[0], wide[0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38])
def test_what_a_row_does_not_see_changes_no_bit_whatever_it_is(attention, value):
    """Behind the window or later in the same chunk; or else one request's overflow could reach another."""
    story = Story(Model(kv_heads=1, ratio=4, head_dim=64, window=50), [200], 6)
    clean, _ = story.run(attention, story.whole(0))
    story.qkv[0][100, story.heads[0] :] = value
    spoilt, _ = story.run(attention, story.whole(0))
    assert torch.equal(spoilt[0][:100], clean[0][:100])
    assert torch.equal(spoilt[0][150:], clean[0][150:])
    assert not spoilt[0][100:150].isfinite().all()


def test_not_even_the_sign_of_zero_depends_on_the_tile(attention):
    """A negative number too small for a float is -0, and adding the nothing of a part not seen makes it 0."""
    story = Story(Model(kv_heads=1, ratio=1, head_dim=16), [300], 9)
    q, k, v = story.qkv[0].split(story.heads, dim=1)
    q[:] = 1.0
    k[0] = 20.0
    v[:128] = 0.0
    v[128:] = -1e-38
    decoded, _ = story.run(attention, story.tokens(0))
    chunk, _ = story.run(attention, [[(0, 230)], [(0, 70)]])
    assert torch.equal(decoded[0].view(torch.int32), chunk[0].view(torch.int32))
    assert not decoded[0][:256].any()


def test_blocks_behind_the_window_are_not_read(attention):
    """Their memory may belong to another sequence by then."""
    model = Model(kv_heads=1, ratio=2, head_dim=16, window=7)
    story = Story(model, [34], 7)
    expected, cache = story.run(attention, [[(0, 30)], [(0, 4)]], block_size=4)
    tables = torch.randperm(10, generator=torch.Generator().manual_seed(0))[1:].view(1, 9)
    q, k, v = story.qkv[0][30:].split(story.heads, dim=1)
    batch = batch_of([(0, 30, 34)], tables, 4)
    batch.block_table[0, :6] = 10**6  # no such block; the first row sees 24 .. 30
    assert torch.equal(attention(q, k, v, cache, batch, model.params), expected[0][30:])


def test_a_pool_that_is_not_one_piece_of_memory_is_refused_and_not_lost(attention):
    pool = torch.zeros(2, 4, 3, 16).transpose(0, 1)
    q = torch.zeros(1, 2, 16)
    batch = batch_of([(0, 0, 1)], torch.zeros(1, 1, dtype=torch.int64), 2)
    with pytest.raises(RuntimeError, match="view"):
        attention(q, q, q, LayerCache(pool, pool), batch, AttentionParams(scale=1.0))


def test_a_head_size_that_is_no_multiple_of_16_is_refused_by_name():
    with pytest.raises(ConfigError, match="head size 40 is not a multiple of 16"):
        CpuAttention(head_dim=40)


def test_torch_keeps_its_number_of_threads():
    torch.set_num_threads(1)
    CpuAttention()
    assert torch.get_num_threads() == 1


CHILD = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from test_cpu_attention import CpuAttention, Model, Story, ThreadPool
attention = CpuAttention(ThreadPool(2))
story = Story(Model(kv_heads=2, ratio=3, head_dim=80, window=300, softcap=5.0), [400, 150], 8)
outputs, _ = story.run(attention, story.shuffled(8))
digest = hashlib.sha256(b"".join(out.numpy().tobytes() for out in outputs)).hexdigest()
print(digest, attention.kernel.num_cache_hits)
"""


def _child(**environment):
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", CHILD, here]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.big
@pytest.mark.skipif(not has_wide_registers(), reason="this machine has narrow registers itself")
def test_narrow_registers_give_the_bits_of_wide_ones_and_the_second_start_compiles_nothing(tmp_path):
    wide = {"NUMBA_CACHE_DIR": str(tmp_path / "wide")}
    narrow = {
        "NUMBA_CACHE_DIR": str(tmp_path / "narrow"),
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c",
    }
    digest, hits = _child(**wide)
    assert hits == "0"
    assert _child(**wide) == [digest, "2"], "the kernel, and the work that its threads share"
    assert _child(**narrow) == [digest, "0"]
