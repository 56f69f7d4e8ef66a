"""The random numbers, and whether many draws have the frequencies of the distribution they are drawn from."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampler_oracle import distribution, make_row

from legato.runner.random import random64
from legato.runner.sampler import sample
from legato.sampling_params import SamplingParams

DRAWS = 20_000
seeds = st.integers(-(2**63), 2**63 - 1)

# (seed, index) of draw i: one long reply, first tokens of many replies, seeds that differ in high bits only.
STREAMS: dict[str, Callable[[int], tuple[int, int]]] = {
    "one reply": lambda i: (-3, i),
    "neighbouring seeds": lambda i: (i, 0),
    "seeds of equal low bits": lambda i: (i << 40, 5),
    "negative seeds": lambda i: (-(2**63) + i, 1),
    "seed and index together": lambda i: (i, i),
}
streams = pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())


def chi_square(observed: list[int], expected: list[float]) -> float:
    """How many standard deviations Pearson's statistic lies above its mean; rare outcomes count as one."""
    common = [(o, e) for o, e in zip(observed, expected, strict=True) if e >= 5]
    rare = (sum(observed) - sum(o for o, _ in common), sum(expected) - sum(e for _, e in common))
    bins = common + [rare] * (rare[1] >= 5)
    statistic = sum((o - e) ** 2 / e for o, e in bins)
    freedom = len(bins) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


def test_the_stream_is_splitmix64() -> None:
    """Published first outputs of SplitMix64 for the state 1234567, with the seed's mixing undone."""
    assert [random64(unmix(1234567), i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def unmix(z: int) -> int:
    """The 64-bit integer that SplitMix64's finalizer turns into z, by undoing its steps in reverse order."""
    mask = 2**64 - 1

    def unshift(value: int, shift: int) -> int:
        out = value
        for _ in range(64 // shift + 1):
            out = value ^ (out >> shift)
        return out

    z = unshift(z, 31) * pow(0x94D049BB133111EB, -1, 2**64) & mask
    z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return unshift(z, 30)


@given(seeds, st.integers(0, 2**31))
def test_any_64_bit_seed_gives_a_64_bit_number(seed: int, index: int) -> None:
    """B-23: the ends of the signed range and negative seeds are as good as any."""
    assert 0 <= random64(seed, index) < 2**64
    assert random64(seed, index) == random64(seed, index)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_extreme_seeds_draw_without_overflow(seed: int) -> None:
    """B-23."""
    row = make_row(SamplingParams(max_tokens=9, seed=seed, top_p=0.9))
    assert 0 <= sample(torch.zeros(1, 300), (row,))[0].token < 270


@streams
@pytest.mark.parametrize("shift", [0, 30, 56])
def test_every_byte_of_the_numbers_is_uniform(stream: Callable[[int], tuple[int, int]], shift: int) -> None:
    counts = Counter(random64(*stream(i)) >> shift & 255 for i in range(DRAWS))
    assert chi_square([counts[byte] for byte in range(256)], [DRAWS / 256] * 256) < 4


@streams
@pytest.mark.parametrize(
    "change",
    [{}, {"temperature": 0.5}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9}],
    ids=str,
)
def test_frequencies_match_the_distribution(
    stream: Callable[[int], tuple[int, int]], change: dict[str, float]
) -> None:
    params = replace(SamplingParams(max_tokens=9), **change)
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3))
    p = distribution(logits[0].double().numpy(), params)
    counts: Counter[int] = Counter()
    for i in range(DRAWS // 10):
        seed, index = stream(i)
        row = make_row(replace(params, seed=seed))._replace(num_generated=index)
        counts[sample(logits, (row,))[0].token] += 1
    possible = np.flatnonzero(p)
    assert set(counts) <= set(possible.tolist())
    expected = p[possible] * (DRAWS // 10)
    assert chi_square([counts[token] for token in possible.tolist()], expected.tolist()) < 4
