"""Bit-identical logits whatever the schedule: the promise of the CPU back end."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_steps import GEMMA, LLAMA, tiny_weights
from torch import Tensor
from torch.nn import functional as F

from legato.attention.cpu import CpuAttention
from legato.models.decoder import Decoder
from legato.models.projection import LayerOps, TorchOps
from legato.models.spec import ModelSpec
from legato.runner.backends import layer_ops
from legato.runner.exactness import ExactnessCheck, ExactnessReport
from legato.runner.kv_cache import KVCache

CPU = torch.device("cpu")
LENGTHS = (1, 7, 40, 150)
# Sizes that the integer products work with.
SIZES = {"head_dim": 32, "intermediate_size": 64}
SPECS = {"llama": replace(LLAMA, **SIZES), "gemma": replace(GEMMA, **SIZES)}
WEIGHTS = {kind: layer_ops(kind) for kind in ("fp16", "w16", "w8")}
ATTENTION = CpuAttention()


def check(
    spec: ModelSpec,
    ops: LayerOps,
    *,
    seed: int,
    block_size: int = 16,
    kv: torch.dtype = torch.float32,
) -> ExactnessReport:
    decoder = Decoder(spec, tiny_weights(spec), attention=ATTENTION, ops=ops)
    num_blocks = 2 + sum(-(-length // block_size) for length in LENGTHS)
    cache = KVCache(spec, num_blocks=num_blocks, block_size=block_size, dtype=kv, device=CPU)
    return ExactnessCheck(decoder, cache, seed=seed, lengths=LENGTHS).run(lambda report: report.schedules < 3)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", SPECS)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 3, 16, 32, 64]),
    kv=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=15, deadline=None)
def test_logits_are_the_same_bits_in_every_schedule(
    family: str, weights: str, seed: int, block_size: int, kv: torch.dtype
) -> None:
    report = check(SPECS[family], WEIGHTS[weights], seed=seed, block_size=block_size, kv=kv)
    assert report.mismatches == 0, report.first_mismatch
    assert report.comparisons > 10


def test_the_schedules_are_wild_enough_to_mean_something() -> None:
    report = check(SPECS["gemma"], WEIGHTS["w16"], seed=1)
    for seed in range(2, 8):
        more = check(SPECS["gemma"], WEIGHTS["w16"], seed=seed)
        report.preemptions += more.preemptions
        report.comparisons += more.comparisons
        report.chunk_sizes = max(report.chunk_sizes, more.chunk_sizes)
    assert report.preemptions > 3
    assert report.chunk_sizes > 3
    assert report.comparisons > 200


class Leaning:
    """A linear layer whose rows lean on their number, by one rounding."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x.double(), self._weight.double()).float()
        return y if len(x) % 2 else torch.nextafter(y, torch.tensor(torch.inf))


def test_one_rounding_that_depends_on_the_batch_is_found() -> None:
    leaning: Callable[[Tensor, Tensor | None], Leaning] = Leaning
    report = check(SPECS["llama"], TorchOps(leaning), seed=3)
    assert report.mismatches > 0
    assert report.first_mismatch is not None
