"""Rows with a constraint: what it forbids is never drawn, and nothing else changes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.core.lifecycle import FinishReason
from legato.core.request import RequestId
from legato.core.step_plan import SampleRow, SamplingFailure, TokenLogprobs
from legato.errors import ConstraintError
from legato.runner.sampler import sample
from legato.sampling_params import SamplingParams

VOCAB = 1003


@dataclass(frozen=True)
class Fixed:
    """Allows the same tokens everywhere; none is a fault."""

    tokens: frozenset[int]
    num_bytes: int = 126

    def mask(self, generated: Sequence[int]) -> bytes:
        if not self.tokens:
            raise ConstraintError(f"nothing after {len(generated)}")
        bits = np.zeros(8 * self.num_bytes, dtype=bool)
        bits[sorted(self.tokens)] = True
        return np.packbits(bits, bitorder="little").tobytes()


def row_of(params: SamplingParams, tokens: frozenset[int] | None, *, num_bytes: int = 126) -> SampleRow:
    matcher = None if tokens is None else Fixed(tokens, num_bytes)
    return SampleRow(0, RequestId("r"), params, 3, (1, 2), (4, 5, 4), matcher)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    min_tokens=st.sampled_from([0, 9]),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 99),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((4, 50.0), (900, -3.0))]),
    logprobs=st.sampled_from([None, 0, 3]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset((7,))]),
)
TOKENS = st.one_of(st.none(), st.frozensets(st.integers(0, VOCAB - 1), min_size=1, max_size=30))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.builds(row_of, PARAMS, TOKENS), min_size=1, max_size=8), seed=st.integers(0, 9))
def test_a_masked_row_is_drawn_as_if_the_others_had_no_chance(rows: list[SampleRow], seed: int) -> None:
    """Compared with the sampler on logits that a test masked, row by row: bit-equal, in any company."""
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    before = logits.clone()
    for row, line, got in zip(rows, logits, sample(logits, rows), strict=True):
        plain = row._replace(matcher=None)
        if row.matcher is None:
            assert got == sample(line[None], (plain,))[0]
            continue
        allowed = row.matcher.tokens  # type: ignore[attr-defined]
        if row.num_generated < row.params.min_tokens:
            allowed = allowed - row.params.stop_token_ids or allowed
        masked = torch.full((VOCAB,), -math.inf)
        masked[sorted(allowed)] = line[sorted(allowed)]
        params = replace(row.params, min_tokens=0, logprobs=None)
        assert got.token in allowed
        assert got.token == sample(masked[None], (plain._replace(params=params),))[0].token
    assert torch.equal(logits, before)


def test_log_probabilities_are_the_models_before_the_mask() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 10.0
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=1)
    (got,) = sample(logits, (row_of(params, frozenset((5,))),))
    logprobs = logits[0].log_softmax(0)
    assert got == TokenLogprobs(5, float(logprobs[5]), ((7, float(logprobs[7])),))


def test_a_constraint_that_fails_is_a_fault_of_its_row_alone() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=1)
    logits = torch.randn(3, VOCAB)
    rows = [row_of(params, tokens) for tokens in (None, frozenset[int](), frozenset((5,)))]
    first, failed, last = sample(logits, rows)
    assert failed == SamplingFailure(FinishReason.CONSTRAINT, "nothing after 3")
    assert (isinstance(first, TokenLogprobs), last.token) == (True, 5)
    assert first.token == int(logits[0].argmax())


@pytest.mark.parametrize("num_bytes", [10, 200])
def test_a_mask_may_be_shorter_or_longer_than_the_logits(num_bytes: int) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0)
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    assert sample(logits, (row_of(params, frozenset((3, 60)), num_bytes=num_bytes),))[0].token == 60
