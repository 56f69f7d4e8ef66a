"""The sampler against a slow oracle, against Hugging Face's processors, and against its own promises."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampler_oracle import adjusted, distribution, inverse_cdf, make_row, ranked
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from legato.core.lifecycle import FinishReason
from legato.core.step_plan import SampleRow, SamplingFailure, TokenLogprobs
from legato.runner.adjust import adjust, is_adjusted
from legato.runner.draw import best, draw
from legato.runner.random import random64
from legato.runner.sampler import sample
from legato.sampling_params import SamplingParams

V = 61
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)
DRAWN = SamplingParams(max_tokens=99, seed=7)


def random_logits(rows: int, vocab: int = V, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample_one(logits: Tensor, row: SampleRow) -> TokenLogprobs:
    return sample(logits[None], (row,))[0]


ids = st.integers(0, V - 1)
histories = st.lists(ids | st.integers(0, 3), max_size=20).map(tuple)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    min_tokens=st.integers(0, 9),
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, V - 1, V, V + 1, 10**9]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.1, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.8]),
    seed=st.integers(-(2**63), 2**63 - 1),
    allowed_token_ids=st.none() | st.frozensets(ids, min_size=25),
    bad_words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    logprobs=st.none() | st.integers(0, V),
    stop_token_ids=st.frozensets(ids, max_size=4),
)
rows = st.builds(make_row, params, generated=histories, prompt=histories)


@settings(max_examples=400)
@given(row=rows, seed=st.integers(0, 10**6))
def test_a_token_is_what_the_definitions_and_the_uniform_number_say(row: SampleRow, seed: int) -> None:
    """Truncated distributions are laid out best first, full ones by id; u picks the share that holds it."""
    logits = random_logits(1, seed=seed)[0]
    bent = adjusted(logits.double().numpy(), row)
    token = sample_one(logits, row).token
    if row.params.greedy:
        assert token == ranked(bent)[0]
        return
    p = distribution(bent, row.params)
    full = (row.params.top_k or V) >= V and row.params.top_p == 1
    u = random64(row.params.seed or 0, row.num_generated) / 2**64
    expected, distance = inverse_cdf(p, list(range(V)) if full else ranked(bent), u)
    assume(distance > 1e-5 or p[expected] == 1)  # fp32 and fp64 may differ on a boundary
    assert token == expected


@given(row=rows, seed=st.integers(0, 10**6))
@settings(deadline=None)
def test_bias_ban_and_penalties_give_the_numbers_of_their_definitions(row: SampleRow, seed: int) -> None:
    logits = random_logits(1, seed=seed)[0]
    expected = torch.from_numpy(adjusted(logits.double().numpy(), row)).float()
    torch.testing.assert_close(adjust(logits, row), expected)
    assert is_adjusted(row) or torch.equal(adjust(logits, row), logits)


@given(row=rows, seed=st.integers(0, 10**6))
def test_logprobs_are_of_the_models_own_distribution(row: SampleRow, seed: int) -> None:
    logits = random_logits(1, seed=seed)[0]
    result = sample_one(logits, row)
    if row.params.logprobs is None:
        assert (result.logprob, result.top) == (None, ())
        return
    exact = logits.double().log_softmax(-1)
    assert result.logprob == pytest.approx(float(exact[result.token]), abs=1e-5)
    assert [token for token, _ in result.top] == ranked(logits.double().numpy())[: row.params.logprobs]
    assert [logprob for _, logprob in result.top] == pytest.approx(
        [float(exact[token]) for token, _ in result.top], abs=1e-5
    )


@given(batch=st.lists(rows, min_size=1, max_size=6), seed=st.integers(0, 10**6))
@settings(deadline=None)
def test_a_row_alone_equals_the_row_in_any_batch_bit_for_bit(batch: list[SampleRow], seed: int) -> None:
    """I-06: parameters stay with their row. Equality is exact, log-probabilities included."""
    logits = random_logits(len(batch), seed=seed)
    before = logits.clone()
    together = sample(logits, batch)
    assert torch.equal(logits, before)
    assert together[::-1] == sample(logits.flip(0), batch[::-1])
    for i, row in enumerate(batch):
        assert together[i] == sample_one(logits[i], row)


@pytest.mark.parametrize("vocab", [1, 2, 257, 32_003, 151_936, 262_144])
def test_real_vocabularies_give_the_same_bits_alone_and_in_a_batch(vocab: int) -> None:
    """I-01, I-02. Rows of odd vocabularies start at addresses that no vector unit likes."""
    kinds = (GREEDY, DRAWN, replace(DRAWN, top_p=0.9), replace(DRAWN, top_k=50), replace(DRAWN, min_p=0.05))
    batch = [make_row(replace(kinds[i % 5], seed=i, logprobs=5), generated=(0,) * i) for i in range(11)]
    logits = random_logits(11, vocab)
    together = sample(logits, batch)
    assert together == tuple(sample_one(logits[i].clone(), row) for i, row in enumerate(batch))
    assert together[:4] == sample(logits[:4], batch[:4])


def test_a_batch_of_plain_greedy_rows_costs_one_argmax() -> None:
    class Calls(TorchDispatchMode):
        """Counts the real operations by name."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    logits = random_logits(8)
    with Calls():
        sample(logits, [make_row(GREEDY)] * 8)
    assert names.count("gather") == 1
    assert set(names) <= {"gather", "squeeze", "lift_fresh", "detach"}  # numpy finds the ids


@pytest.mark.parametrize("top", [[3], [0, 5], [60], [7, 8, 9]])
def test_greedy_takes_the_lowest_id_among_equals(top: list[int]) -> None:
    logits = torch.zeros(V)
    logits[top] = 4.0
    assert sample_one(logits, make_row(GREEDY)).token == top[0]
    assert sample_one(logits, make_row(replace(DRAWN, top_k=1))).token == top[0]


@given(st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5]), min_size=1, max_size=40), st.integers(0, 45))
def test_best_is_exact_among_equals(values: list[float], k: int) -> None:
    assert best(torch.tensor(values), k).tolist() == ranked(np.array(values))[:k]


@pytest.mark.parametrize(
    ("change", "same_as_greedy"),
    [
        ({"top_p": 1e-8}, True),
        ({"top_p": 1e-9}, True),
        ({"top_p": 0.0}, True),
        ({"min_p": 1.0}, True),
        ({"top_k": 1}, True),
        ({"top_k": V}, False),
        ({"top_k": 2**31}, False),
        ({"top_p": 1e-9, "top_k": 5, "min_p": 0.5}, True),
        ({"temperature": 1e-5}, True),
        ({"temperature": 5e-324}, True),
    ],
)
def test_truncation_never_empties_and_acts_greedy_at_its_limit(
    change: dict[str, float], same_as_greedy: bool
) -> None:
    """B-10: tiny top_p, min_p 1 and top_k 1 act greedy; top_k above the vocabulary means off."""
    logits = random_logits(1)[0]
    bent = replace(DRAWN, **change)
    draws = [sample_one(logits, make_row(bent, generated=(0,) * i)).token for i in range(200)]
    if same_as_greedy:
        assert set(draws) == {int(logits.argmax())}
    else:
        off = [sample_one(logits, make_row(DRAWN, generated=(0,) * i)).token for i in range(200)]
        assert len(set(draws)) > 5
        assert draws == off


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 100.0])
@pytest.mark.parametrize("change", [{}, {"top_p": 1e-9}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 1.0}])
def test_a_row_with_one_possible_token_gives_it(temperature: float, change: dict[str, float]) -> None:
    logits = torch.full((V,), -torch.inf)
    logits[17] = -1e30
    row = make_row(replace(DRAWN, temperature=temperature, **change))
    assert sample_one(logits, row).token == 17


@pytest.mark.parametrize(
    ("top_p", "size"), [(1e-9, 1), (0.25, 1), (0.2501, 2), (0.5, 2), (0.7501, 4), (1.0, 4)]
)
def test_a_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, size: int) -> None:
    """Four equal logits: each has exactly a quarter, and the lowest ids come first."""
    kept = {draw(torch.zeros(4), replace(DRAWN, top_p=top_p), i << 61) for i in range(8)}
    assert kept == set(range(size))


@pytest.mark.parametrize(
    ("random", "token"), [(0, 1), (2**62 - 1, 1), (2**62, 2), (2**63 - 1, 2), (2**63, 4), (2**64 - 1, 4)]
)
def test_shares_are_half_open_and_tokens_without_weight_have_none(random: int, token: int) -> None:
    """Ids 0, 3 and 5 cannot come; 1 and 2 have a quarter each and 4 has a half."""
    never = -torch.inf
    assert draw(torch.tensor([never, 0, 0, never, math.log(2), never]), DRAWN, random) == token


def test_a_nucleus_wider_than_the_first_look_is_found() -> None:
    """Equal logits: the nucleus of 0.5 is exactly the lower half of 10,000 ids."""
    row = make_row(replace(DRAWN, top_p=0.5))
    draws = [sample_one(torch.zeros(10_000), row._replace(num_generated=i)).token for i in range(300)]
    assert max(draws) < 5_000
    assert min(draws) < 100
    assert max(draws) > 4_800


@pytest.mark.parametrize("bias", [100.0, -100.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_a_hundred_forces_or_bans(bias: float, temperature: float) -> None:
    logits = random_logits(1)[0]
    token = int(logits.argmin() if bias > 0 else logits.argmax())
    bent = replace(DRAWN, temperature=temperature, logit_bias=((token, bias),))
    draws = {sample_one(logits, make_row(bent, generated=(0,) * i)).token for i in range(100)}
    assert (draws == {token}) if bias > 0 else (token not in draws)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_stop_tokens_wait_for_the_minimum(temperature: float) -> None:
    logits = torch.zeros(V)
    logits[[4, 9]] = 50.0
    bent = replace(DRAWN, temperature=temperature, min_tokens=3, stop_token_ids=frozenset({4, 9}))
    stopped = [sample_one(logits, make_row(bent, generated=(0,) * i)).token in (4, 9) for i in range(6)]
    assert stopped == [False, False, False, True, True, True]


NO_CHOICE = "no token can be chosen, the highest logit is"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", [GREEDY, DRAWN, replace(GREEDY, logit_bias=((3, 1.0),))])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_logits_that_allow_no_choice_are_a_fault_of_their_row_alone(
    value: float, kind: SamplingParams, place: int
) -> None:
    """F-18, B-23: what is drawn for the others, and how likely it was, is what it is without that row."""
    logits = random_logits(3)
    batch = [make_row(replace(kind, logprobs=2, seed=i)) for i in range(3)]
    sound = sample(logits, batch)
    logits[place, 40] = value
    for i, one in enumerate(sample(logits, batch)):
        if i == place:
            assert one == SamplingFailure(FinishReason.ERROR, f"{NO_CHOICE} {value}")
        else:
            assert one == sound[i]


def test_banning_every_token_is_a_fault_and_not_a_token() -> None:
    bent = replace(DRAWN, min_tokens=1, stop_token_ids=frozenset(range(V)))
    one = sample_one(random_logits(1)[0], make_row(bent))
    assert one == SamplingFailure(FinishReason.ERROR, f"{NO_CHOICE} -inf")


hf_cases = pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 1},
        {"top_k": 9},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"min_p": 0.02},
        {"min_p": 0.6},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.8},
        {"temperature": 1.4, "min_p": 0.01, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    ],
    ids=str,
)


@hf_cases
def test_draws_follow_the_distribution_of_hugging_face_processors(change: dict[str, float]) -> None:
    """The same transforms by Hugging Face, called in our order; u then picks from their probabilities."""
    bent = replace(DRAWN, **change)
    prompt, generated = (3, 9, 9, 14), (20, 21, 20)
    compared = 0
    for seed in range(150):
        logits = random_logits(1, seed=seed)
        scores = hugging_face(bent)(torch.tensor([prompt + generated]), logits.clone())
        p = scores[0].double().softmax(-1).numpy()
        row = make_row(replace(bent, seed=seed), prompt=prompt, generated=generated)
        truncated = bent.top_k or bent.top_p < 1
        order = ranked(scores[0].double().numpy()) if truncated else list(range(V))
        expected, distance = inverse_cdf(p, order, random64(seed, len(generated)) / 2**64)
        if distance > 1e-5 or p[expected] == 1:
            assert sample_one(logits[0], row).token == expected
            compared += 1
    assert compared > 140


def hugging_face(p: SamplingParams) -> LogitsProcessorList:
    return LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(p.repetition_penalty),
            TemperatureLogitsWarper(p.temperature),
            MinPLogitsWarper(p.min_p),
            *([TopKLogitsWarper(p.top_k)] if p.top_k else []),
            TopPLogitsWarper(p.top_p),
        ]
    )
