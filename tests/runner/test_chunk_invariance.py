"""The founding contract: chunking changes when K and V are computed, never what comes of them."""

from dataclasses import replace

import pytest
import torch
from runner_steps import GEMMA, GREEDY, LLAMA, VOCAB, Stream, complete, random_prompt, step, tiny_runner

from legato.core.step_plan import TokenLogprobs
from legato.models.spec import ModelSpec
from legato.sampling_params import SamplingParams

TOLERANCE = 1e-4
SCATTERED = (37, 5, 60, 0, 22, 41, 9, 58, 13, 2, 50, 31, 17, 44, 26, 63, 8, 35, 20, 11)
CONTIGUOUS = tuple(range(20))
SEES_ALL = replace(GREEDY, logprobs=VOCAB)
families = pytest.mark.parametrize("spec", [LLAMA, GEMMA], ids=["llama", "gemma"])


def distributions(sampled: list[TokenLogprobs]) -> torch.Tensor:
    """[tokens, V]: the log-probability of every id at every generated token."""
    return torch.tensor([[logprob for _, logprob in sorted(one.top)] for one in sampled])


def margins(sampled: list[TokenLogprobs]) -> list[float]:
    return [one.top[0][1] - one.top[1][1] for one in sampled]


@families
@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
@pytest.mark.parametrize("blocks", [CONTIGUOUS, SCATTERED], ids=["contiguous", "scattered"])
def test_chunked_prefill_matches_whole_within_tolerance(
    spec: ModelSpec, chunk: int, blocks: tuple[int, ...]
) -> None:
    """The prompt is six windows long, so that chunks start and end in, at and beyond a window."""
    prompt = random_prompt(49)
    whole = complete(tiny_runner(spec), Stream(CONTIGUOUS, prompt, SEES_ALL), 24)
    chunked = complete(tiny_runner(spec), Stream(blocks, prompt, SEES_ALL), 24, chunk=chunk)
    assert min(margins(whole.sampled)) > 10 * TOLERANCE, "this model is too undecided to compare tokens"
    assert chunked.generated == whole.generated
    torch.testing.assert_close(
        distributions(chunked.sampled), distributions(whole.sampled), atol=TOLERANCE, rtol=0
    )


@families
def test_a_mixed_batch_gives_each_request_what_it_gets_alone(spec: ModelSpec) -> None:
    """I-02: decodes, chunks of different sizes and arrivals in mid-flight, all in the same steps."""
    prompts = [random_prompt(length, seed=length) for length in (30, 11, 23, 1)]
    tables = [SCATTERED[i::4] + tuple(range(64 + 11 * i, 75 + 11 * i)) for i in range(4)]
    alone = [complete(tiny_runner(spec), Stream(CONTIGUOUS, prompt, SEES_ALL), 12) for prompt in prompts]
    runner = tiny_runner(spec, num_blocks=128)
    streams = [
        Stream(table, prompt, SEES_ALL, id=str(i))
        for i, (table, prompt) in enumerate(zip(tables, prompts, strict=True))
    ]
    chunks = (7, 1, 16, 3)
    for now in range(60):
        arrived = [
            (stream, chunk)
            for i, (stream, chunk) in enumerate(zip(streams, chunks, strict=True))
            if now >= 2 * i and len(stream.sampled) < 12
        ]
        if arrived:
            step(runner, arrived if now % 2 else arrived[::-1])
    for mixed, solo in zip(streams, alone, strict=True):
        assert min(margins(solo.sampled)) > 10 * TOLERANCE
        assert mixed.generated == solo.generated
        torch.testing.assert_close(
            distributions(mixed.sampled), distributions(solo.sampled), atol=TOLERANCE, rtol=0
        )


@pytest.mark.parametrize("copies", [4, 16])
def test_greedy_copies_in_one_batch_all_equal_the_lone_run(copies: int) -> None:
    """I-02: fp32 on the CPU, the same prompt alone and as 4 and 16 copies at once."""
    prompt = random_prompt(13)
    solo = complete(tiny_runner(LLAMA), Stream(tuple(range(8)), prompt), 16)
    runner = tiny_runner(LLAMA, num_blocks=8 * copies)
    streams = [Stream(tuple(range(8 * i, 8 * i + 8)), prompt, id=str(i)) for i in range(copies)]
    while len(streams[0].sampled) < 16:
        step(runner, [(stream, 5) for stream in streams])
    assert all(stream.generated == solo.generated for stream in streams)


@families
@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_seeded_draws_do_not_depend_on_the_chunk_size(spec: ModelSpec, chunk: int) -> None:
    """E-07: temperature 1, seed 7, penalties and logprobs on; a prompt of several chunks against one."""
    params = SamplingParams(
        max_tokens=100, temperature=1.0, seed=7, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, logprobs=3,
    )  # fmt: skip
    prompt = random_prompt(35)
    whole = complete(tiny_runner(spec), Stream(CONTIGUOUS, prompt, params), 24)
    chunked = complete(tiny_runner(spec), Stream(SCATTERED, prompt, params), 24, chunk=chunk)
    assert chunked.generated == whole.generated
    assert len(set(whole.generated)) > 8, "a constant reply would prove nothing"
    assert [one.logprob for one in chunked.sampled] == pytest.approx(
        [one.logprob for one in whole.sampled], abs=TOLERANCE
    )


def test_a_seed_alone_decides_a_reply_whatever_the_batch_mates_draw() -> None:
    """I-01: first request seed 42, its batch-mate another seed in each of 4 rounds."""

    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=16, temperature=0.8, seed=seed)

    prompt = random_prompt(9)
    solo = complete(tiny_runner(LLAMA), Stream(CONTIGUOUS, prompt, params(42)), 16)
    mates = []
    for seed in (7, -1, 2**62, 43):
        runner = tiny_runner(LLAMA)
        first = Stream(CONTIGUOUS, prompt, params(42), id="first")
        mate = Stream(tuple(range(20, 40)), prompt, params(seed), id="mate")
        while len(first.sampled) < 16:
            step(runner, [(mate, 100), (first, 100)])
        assert first.generated == solo.generated
        mates.append(tuple(mate.generated))
    assert len({*mates, tuple(solo.generated)}) == 5, "other seeds must give other replies"


def test_parameters_travel_with_their_request_through_joins_and_leaves() -> None:
    """I-06: a penalized and biased request beside a plain one; row order, finish times and joins vary."""
    bent = replace(GREEDY, repetition_penalty=1.5, logit_bias=((3, 4.0), (77, -6.0)))
    prompt = random_prompt(9)
    alone = {
        params: complete(tiny_runner(LLAMA), Stream(CONTIGUOUS, prompt, params), 20).generated
        for params in (bent, GREEDY)
    }
    assert alone[bent] != alone[GREEDY]
    for order in (1, -1):
        runner = tiny_runner(LLAMA)
        p = Stream(CONTIGUOUS, prompt, bent, id="p")
        q = Stream(tuple(range(20, 40)), prompt, GREEDY, id="q")
        short = Stream(tuple(range(40, 50)), prompt[:5], bent, id="short")
        for now in range(30):
            here = [(short, 4)] * (now < 6) + [(p, 4)] * (3 <= now < 20) + [(q, 4)] * (now >= 5)
            step(runner, here[::order])
        assert p.generated == alone[bent][: len(p.generated)]
        assert q.generated[:20] == alone[GREEDY]
        assert len(p.generated) >= 14
