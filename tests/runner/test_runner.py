"""The runner as a whole: what it computes, what it leaves out, what it reports."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from runner_steps import (
    BLOCK_SIZE,
    CPU,
    GREEDY,
    LLAMA,
    VOCAB,
    Stream,
    complete,
    random_prompt,
    step,
    tiny_runner,
    tiny_weights,
)
from torch import Tensor

from legato.attention.base import AttentionBackend
from legato.attention.cpu import CpuAttention
from legato.attention.reference import ReferenceAttention
from legato.core.lifecycle import FinishReason
from legato.core.request import RequestId
from legato.core.step_plan import ForwardBatch, ForwardSeq, SampleRow, SamplingFailure, StepPlan
from legato.errors import ConfigError
from legato.machine import Processors
from legato.models.decoder import Decoder
from legato.models.linear import DenseLinear
from legato.runner import device
from legato.runner.device import choose_device, describe_device, set_threads
from legato.runner.kv_cache import KVCache
from legato.runner.runner import TorchRunner
from legato.sampling_params import SamplingParams


class WatchedHead:
    """Builds real dense layers and counts the rows that the LM head (the only one V wide) is given."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, weight: Tensor, bias: Tensor | None) -> "DenseLinear | WatchedLinear":
        dense = DenseLinear(weight, bias)
        return WatchedLinear(dense, self.rows) if weight.shape[0] == VOCAB else dense


class WatchedLinear:
    def __init__(self, dense: DenseLinear, rows: list[int]) -> None:
        self._dense = dense
        self._rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        self._rows.append(x.shape[0])
        return self._dense(x)


def test_a_middle_chunk_is_not_sampled_and_its_head_is_never_computed() -> None:
    """E-07: 20 tokens in chunks of 8, 8, 4 beside a decode: only rows at an end reach the LM head."""
    head = WatchedHead()
    runner = tiny_runner(LLAMA, linear=head)
    long, short = Stream((1, 9, 4, 7, 2), random_prompt(20)), Stream((0, 3), [5], id="b")
    step(runner, [(long, 8)])
    assert (head.rows, long.sampled) == ([], [])
    step(runner, [(long, 8), (short, 8)])
    assert (head.rows, len(long.sampled), len(short.sampled)) == ([1], 0, 1)
    step(runner, [(long, 8), (short, 8)])
    assert (head.rows, len(long.sampled), len(short.sampled)) == ([1, 2], 1, 2)


def test_two_tables_that_share_blocks_read_the_same_prefix() -> None:
    """The second request computes only its own end, over blocks that the first one filled."""
    prefix, ends = random_prompt(3 * BLOCK_SIZE), (random_prompt(6, seed=1), random_prompt(7, seed=2))
    runner = tiny_runner(LLAMA)
    first = complete(runner, Stream((8, 1, 5, 20, 21, 22, 23), prefix + ends[0]), 8)
    second = Stream((8, 1, 5, 30, 31, 32, 33), prefix + ends[1], id="b", computed=len(prefix))
    complete(runner, second, 8)
    for stream in (first, second):
        solo = complete(tiny_runner(LLAMA), Stream(tuple(range(7)), stream.prompt), 8)
        assert stream.generated == solo.generated
    # Both go on together, and the second one has not harmed what the first reads.
    step(runner, [(first, 1), (second, 1)])
    solo = complete(tiny_runner(LLAMA), Stream(tuple(range(7)), first.prompt), 9)
    assert first.generated == solo.generated


def test_recomputing_into_other_blocks_continues_as_if_never_preempted() -> None:
    """What was generated is prefilled again with the prompt, and the next draw has the next index."""
    undisturbed = complete(tiny_runner(LLAMA), Stream(tuple(range(9)), random_prompt(9)), 16)
    runner = tiny_runner(LLAMA)
    stream = complete(runner, Stream(tuple(range(9)), random_prompt(9)), 7)
    stream.computed, stream.blocks = 0, tuple(range(50, 59))
    assert complete(runner, stream, 16, chunk=3).generated == undisturbed.generated


def test_the_runner_tells_the_size_of_model_and_cache() -> None:
    runner = tiny_runner(LLAMA, num_blocks=12, block_size=8)
    assert (runner.num_blocks, runner.block_size) == (12, 8)


def test_elapsed_is_read_from_the_given_clock() -> None:
    weights = {name: torch.ones(shape) for name, shape in LLAMA.tensor_shapes().items()}
    decoder = Decoder(LLAMA, weights, attention=ReferenceAttention())
    cache = KVCache(LLAMA, num_blocks=2, block_size=4, dtype=torch.float32, device=CPU)
    ticks = itertools.count(100.0, 0.25)
    runner = TorchRunner(decoder, cache, clock=lambda: next(ticks))
    seq = ForwardSeq(RequestId("a"), (1, 2), 0, (1,))
    plan = StepPlan(ForwardBatch((seq,)), (SampleRow(0, RequestId("a"), GREEDY, 0),))
    assert [runner.run(plan).elapsed for _ in range(2)] == [0.25, 0.25]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_too_large_for_a_float16_cache_end_with_a_word_on_the_remedy(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """F-18: never a silent stream of nonsense. float32 holds the same numbers."""
    weights = tiny_weights(LLAMA)
    weights["layers.0.v"] *= 1e6
    decoder = Decoder(LLAMA, weights, attention=ReferenceAttention())
    cache = KVCache(LLAMA, num_blocks=4, block_size=4, dtype=dtype, device=CPU)
    stream = Stream((1,), [7, 3])
    if dtype == torch.float32:
        assert len(complete(TorchRunner(decoder, cache), stream, 1).sampled) == 1
        return
    (sampled,) = complete(TorchRunner(decoder, cache), stream, 1).sampled
    assert isinstance(sampled, SamplingFailure)
    assert sampled.reason is FinishReason.ERROR
    assert re.match(r"no token .* nan; K and V are kept as float16.*--kv-dtype float32", sampled.message)
    assert f"request a: {sampled.message}" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_choice_that_bans_every_token_has_nothing_to_do_with_the_cache(dtype: torch.dtype) -> None:
    decoder = Decoder(LLAMA, tiny_weights(LLAMA), attention=ReferenceAttention())
    cache = KVCache(LLAMA, num_blocks=4, block_size=4, dtype=dtype, device=CPU)
    everything = SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=frozenset(range(VOCAB)))
    (sampled,) = complete(TorchRunner(decoder, cache), Stream((1,), [7, 3], everything), 1).sampled
    assert isinstance(sampled, SamplingFailure)
    assert sampled.message.endswith("the highest logit is -inf")


@pytest.mark.parametrize("attention", [ReferenceAttention(), CpuAttention()], ids=lambda one: one.name)
def test_a_request_whose_numbers_break_breaks_alone(attention: AttentionBackend) -> None:
    """F-18: neither who shares a step with it feels it, nor who gets its blocks later."""
    spec = replace(LLAMA, head_dim=16)
    weights = tiny_weights(spec)
    weights["embed"][7] = torch.nan
    decoder = Decoder(spec, weights, attention=attention)
    cache = KVCache(spec, num_blocks=8, block_size=4, dtype=torch.float32, device=CPU)
    runner = TorchRunner(decoder, cache)
    prompt = [3, 5, 8, 9, 11, 2]
    alone = complete(runner, Stream((6, 7, 5), prompt, GREEDY), 5).generated
    assert 7 not in alone
    sound, broken = Stream((0, 1, 2), prompt, GREEDY), Stream((3, 4, 5), [3, 7, 5, 4, 8], GREEDY, id="broken")
    step(runner, [(sound, 9), (broken, 9)])
    assert isinstance(broken.sampled[0], SamplingFailure)
    assert complete(runner, sound, 5).generated == alone
    assert complete(runner, Stream((3, 4, 5), prompt, GREEDY), 5).generated == alone


def test_auto_is_the_cpu_even_where_there_is_cuda(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody ever tried the CUDA path: it is taken only by name, and then with a warning."""
    assert choose_device("cpu") == choose_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == CPU
    assert "(auto; there is a CUDA device, --device cuda takes it, but the CUDA path was never tried" in (
        describe_device(CPU, "auto")
    )
    assert not caplog.records
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert "never tried" in caplog.text


@pytest.mark.parametrize(
    ("asked", "usable", "expected"), [(None, 1, 1), (None, 64, 2), (3, 1, 3)], ids=["quota", "none", "asked"]
)
def test_threads_keep_to_the_quota_unless_told_otherwise(
    asked: int | None, usable: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "processors", lambda: Processors(usable, 64, "a quota"))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        set_threads(asked)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "name", ["", "gpu", "CPU", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "mps", "auto:0"]
)
def test_an_unknown_device_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not one of"):
        choose_device(name)


@pytest.mark.parametrize("name", ["cuda:64", *(() if torch.cuda.is_available() else ("cuda", "cuda:0"))])
def test_a_cuda_device_that_is_not_there_is_refused_with_the_count(name: str) -> None:
    with pytest.raises(ConfigError, match=f"this machine has {torch.cuda.device_count()} CUDA"):
        choose_device(name)
