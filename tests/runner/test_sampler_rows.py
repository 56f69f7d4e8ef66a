"""Many rows at once against one row at a time: a slow oracle, and the torch operations that have to agree."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_oracle import make_row
from torch import Tensor

from legato.core.step_plan import SampleRow, SamplingFailure, TokenLogprobs
from legato.runner.adjust import adjust_rows
from legato.runner.draw import best, draw, weigh
from legato.runner.random import random64
from legato.runner.sampler import sample
from legato.sampling_params import SamplingParams

VOCABS = (100, 32_000, 32_003, 262_144)
MOST = 300  # Ids that parameters and histories name; no vocabulary of these tests but 100 is smaller.
ONE = 2**40


def alone(logits: Tensor, row: SampleRow) -> TokenLogprobs:
    """What `sample` gives, from the definitions: one row, everything sorted, sums of Python's integers."""
    params, bent = row.params, adjusted_alone(logits, row)
    token = int((bent == bent.max()).nonzero()[0])
    if not params.greedy:
        token = drawn_alone(bent, params, random64(params.seed or 0, row.num_generated))
    if params.logprobs is None:
        return TokenLogprobs(token)
    logprobs = logits.log_softmax(dim=-1)
    top = ranked(logits)[: params.logprobs]
    return TokenLogprobs(token, float(logprobs[token]), tuple((i, float(logprobs[i])) for i in top))


def adjusted_alone(logits: Tensor, row: SampleRow) -> Tensor:
    params, bent = row.params, logits.clone()
    for token, amount in params.logit_bias:
        bent[token] += amount
    for token in params.stop_token_ids if row.num_generated < params.min_tokens else ():
        bent[token] = -math.inf
    if params.needs_history:
        for token in {*row.prompt, *row.generated}:
            bent[token] *= params.repetition_penalty if bent[token] <= 0 else 1
            bent[token] /= params.repetition_penalty if bent[token] > 0 else 1
        for token, count in Counter(row.generated).items():
            used = torch.tensor(float(count)) * params.frequency_penalty + params.presence_penalty
            bent[token] -= used
    return bent


def drawn_alone(bent: Tensor, params: SamplingParams, random: int) -> int:
    vocab = len(bent)
    scaled = ((bent - bent.max()) / max(params.temperature, 1e-30)).exp() * ONE
    weights = [w if w >= math.ceil(params.min_p * ONE) else 0 for w in scaled.long().tolist()]
    truncated = 0 < params.top_k < vocab or params.top_p < 1
    order = ranked(bent) if truncated else list(range(vocab))
    order = order[: params.top_k or vocab]
    ends = list(accumulate(weights[token] for token in order))
    if params.top_p < 1:
        needed = max(1, math.ceil(params.top_p * ends[-1]))
        ends = ends[: 1 + next((i for i, end in enumerate(ends) if end >= needed), vocab)]
    target = random * ends[-1] >> 64
    return next(token for token, end in zip(order, ends, strict=False) if end > target)


def ranked(values: Tensor) -> list[int]:
    return values.sort(descending=True, stable=True).indices.tolist()


def logits_like_a_model(rows: int, vocab: int, seed: int, *, steps: float = 0.0) -> Tensor:
    """As spread as a model's; with `steps`, rounded to multiples of it, so that many are equal."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4.5
    return (logits / steps).round() * steps if steps else logits


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows_of(most: int) -> st.SearchStrategy[SampleRow]:
    ids = st.integers(0, most - 1)
    params = st.builds(
        SamplingParams,
        max_tokens=st.just(99),
        min_tokens=st.integers(0, 9),
        temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.7, 100.0]),
        top_k=st.sampled_from([0, 0, 1, 40, 99, 129, 1100]),
        top_p=st.sampled_from([1e-9, 0.5, 0.9, 0.999, 1.0, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 1e-3, 0.1, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
        seed=st.integers(-(2**63), 2**63 - 1),
        logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, 2.3, 100.0]), max_size=3).map(
            lambda bias: tuple(bias.items())
        ),
        logprobs=st.none() | st.integers(0, 20),
        stop_token_ids=st.frozensets(ids, max_size=3),
    )
    histories = st.lists(ids | st.integers(0, 3), max_size=20).map(tuple)
    return st.builds(make_row, params, generated=histories, prompt=histories)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([100, 1_500, 9_001]), steps=st.sampled_from([0.0, 0.5, 9.0]))
def test_a_batch_gives_what_the_oracle_gives_for_each_row_alone(
    data: st.DataObject, vocab: int, steps: float
) -> None:
    """Tokens and log-probabilities are equal, not close."""
    batch = data.draw(st.lists(rows_of(min(vocab, MOST)), min_size=1, max_size=9))
    logits = logits_like_a_model(len(batch), vocab, data.draw(st.integers(0, 10**6)), steps=steps)
    assert sample(logits, batch) == tuple(map(alone, logits, batch))


@settings(deadline=None)
@given(batch=st.lists(rows_of(100), min_size=1, max_size=9), seed=st.integers(0, 10**6))
def test_adjusting_many_rows_gives_each_the_bits_of_its_own_changes(
    batch: list[SampleRow], seed: int
) -> None:
    logits = logits_like_a_model(len(batch), 100, seed)
    assert torch.equal(adjust_rows(logits, batch), torch.stack(list(map(adjusted_alone, logits, batch))))


WIDE = [
    SamplingParams(max_tokens=9, seed=1, temperature=3.0, top_p=0.97),
    SamplingParams(max_tokens=9, seed=1, temperature=1.5, top_p=0.9),
    SamplingParams(max_tokens=9, seed=1, temperature=1.5, top_p=0.95, min_p=1e-4),
    SamplingParams(max_tokens=9, seed=1, temperature=2.5, top_k=20_000),
    SamplingParams(max_tokens=9, seed=1, temperature=2.5, top_k=3_000, top_p=0.99),
    SamplingParams(max_tokens=9, seed=1, temperature=1.0, top_k=40, logprobs=20, repetition_penalty=1.3),
    SamplingParams(max_tokens=9, seed=1, temperature=100.0),
    SamplingParams(max_tokens=9, seed=1, temperature=2.0, min_p=1e-3),
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=3, presence_penalty=2.0),
    SamplingParams(max_tokens=9, temperature=0.0),
]


@pytest.mark.parametrize("steps", [0.0, 1.0])
@pytest.mark.parametrize("vocab", VOCABS)
def test_wide_choices_from_real_vocabularies_are_the_oracles(vocab: int, steps: float) -> None:
    """Nuclei and top_k of every width, from one look at the best tokens to the whole vocabulary."""
    batch = [make_row(params, generated=(7, 50) * i, prompt=(3, 50)) for i, params in enumerate(WIDE)]
    logits = logits_like_a_model(len(batch), vocab, vocab, steps=steps)
    together = sample(logits, batch)
    assert together == tuple(map(alone, logits, batch))
    wide = logits_like_a_model(len(batch), vocab + 7, 0)
    wide[:, 3:-4] = logits  # rows that do not follow one another in memory
    assert sample(wide[:, 3:-4], batch) == together


@pytest.mark.parametrize("vocab", VOCABS)
def test_threads_and_batch_mates_change_no_bit(vocab: int, threads: int) -> None:
    params = [replace(p, logprobs=4) for p in WIDE]
    batch = [make_row(p, generated=(7, 50) * i, prompt=(3, 50)) for i, p in enumerate(params)]
    logits = logits_like_a_model(len(batch), vocab, threads)
    together = sample(logits, batch)
    assert together[::-1] == sample(logits.flip(0), batch[::-1])
    assert together == tuple(
        sample(logits[i : i + 1].clone(), batch[i : i + 1])[0] for i in range(len(batch))
    )


BENT = SamplingParams(max_tokens=9, temperature=0.7, min_p=1e-6)
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "weigh": lambda x: weigh(x, x.amax(dim=-1, keepdim=True), [BENT] * len(x)),
    "log_softmax": lambda x: x.log_softmax(dim=-1),
    "amax": lambda x: x.amax(dim=-1),
    "argmax": lambda x: x.argmax(dim=-1),
    "sum of integers": lambda x: (x * ONE).long().sum(dim=-1),
    "cumsum of integers": lambda x: (x * ONE).long().cumsum(dim=-1),
    "best": lambda x: best(x, 20),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
@pytest.mark.parametrize("vocab", VOCABS)
def test_each_operation_on_many_rows_gives_the_bits_of_one_row(
    operation: Callable[[Tensor], Tensor], vocab: int, threads: int
) -> None:
    """Also when the row alone starts at an address that no vector unit likes."""
    for rows in (2, 7):
        logits = logits_like_a_model(rows, vocab, rows + threads)
        together = operation(logits)
        for i in range(rows):
            shifted = torch.empty(vocab + i)[i:].copy_(logits[i])
            assert torch.equal(together[i : i + 1], operation(shifted[None]))


@pytest.mark.parametrize("k", [0, 1, 5, 128, 1_024, 5_000, 300_000])
@pytest.mark.parametrize("steps", [0.0, 0.5, 40.0])
@pytest.mark.parametrize("vocab", [31, 8_193, *VOCABS])
def test_best_is_the_head_of_a_stable_sort(vocab: int, steps: float, k: int) -> None:
    """Steps of 40 leave little but zeros, negative ones among them."""
    values = logits_like_a_model(2, vocab, k, steps=steps)
    values[0, -1] = 50.0
    values[1, vocab // 3 :] = -math.inf
    expected = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(best(values, k), expected)
    assert torch.equal(best(values[1], k), expected[1])


def test_equal_logits_in_every_block_are_taken_from_the_first() -> None:
    values = torch.zeros(20_000)
    values[[19_999, 40, 10_000]] = 1.0
    assert best(values, 6).tolist() == [40, 10_000, 19_999, 0, 1, 2]


@pytest.mark.parametrize("token", [0, 31, 32, 33, 64, 95])
def test_shares_of_equal_tokens_meet_exactly_between_blocks(token: int) -> None:
    """Of 128 equal tokens each has 2**57 of the 2**64 random numbers."""
    plain = SamplingParams(max_tokens=9)
    assert draw(torch.zeros(128), plain, token << 57) == token
    assert draw(torch.zeros(128), plain, (token + 1 << 57) - 1) == token


def test_a_share_just_above_a_half_needs_the_second_of_two() -> None:
    above = SamplingParams(max_tokens=9, top_p=math.nextafter(0.5, 1))
    assert draw(torch.zeros(2), above, 2**64 - 1) == 1


def test_a_top_p_of_one_keeps_even_what_fp64_cannot_count() -> None:
    """2**54 and 1 are 2**54 in fp64; the last number of all belongs to the token of weight 1."""
    logits = torch.zeros(2**14 + 2)
    logits[2**14 :] = torch.tensor([-27.7, -math.inf])
    assert draw(logits, SamplingParams(max_tokens=9, top_k=2**14 + 1), 2**64 - 1) == 2**14


@pytest.mark.parametrize("kind", WIDE, ids=str)
def test_one_broken_row_among_rows_of_its_kind_breaks_alone(kind: SamplingParams) -> None:
    logits = logits_like_a_model(6, 100, 0)
    batch = [make_row(kind) for _ in range(6)]
    sound = sample(logits, batch)
    logits[4, 99] = math.nan
    broken = sample(logits, batch)
    assert isinstance(broken[4], SamplingFailure)
    assert broken[:4] + broken[5:] == sound[:4] + sound[5:]
