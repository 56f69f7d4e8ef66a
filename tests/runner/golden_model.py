"""A real model in fp32, and what Hugging Face recorded of it to compare with (see tests/golden/README.md)."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from runner_steps import CPU, GREEDY, Stream, step

from legato.attention.reference import ReferenceAttention
from legato.core.request import RequestId
from legato.core.step_plan import ForwardBatch, ForwardSeq, StepPlan, TokenLogprobs
from legato.models.decoder import Decoder
from legato.models.load import open_model
from legato.models.source import resolve
from legato.runner.inputs import build_inputs
from legato.runner.kv_cache import KVCache
from legato.runner.runner import TorchRunner

WHOLE = 10_000  # longer than any prompt
BLOCK_SIZE = 16
GOLDEN = Path(__file__).parents[1] / "golden"
LOW_MARGIN = 0.05  # a choice this close may fall either way in another order of fp32 sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt and what Hugging Face makes of it."""

    prompt: list[int]
    sum_nll: float
    top: list[tuple[int, float]]
    greedy: list[int]
    margins: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    decoder: Decoder
    cache: KVCache
    runner: TorchRunner


def load_cases(name: str) -> list[Case]:
    return [
        Case(
            prompt=case["prompt_ids"],
            sum_nll=case["sum_nll"],
            top=[(token, logprob) for token, logprob in case["last_logprob_top5"]],
            greedy=case["greedy"],
            margins=case["greedy_margin"],
        )
        for case in json.loads((GOLDEN / name).read_text())
    ]


def load_model(path: Path) -> Loaded:
    opened = open_model(resolve(str(path), cache_dir=path.parent))
    weights = opened.weights(dtype=torch.float32, device=CPU)
    decoder = Decoder(opened.spec, weights, attention=ReferenceAttention())
    cache = KVCache(opened.spec, num_blocks=128, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
    return Loaded(decoder=decoder, cache=cache, runner=TorchRunner(decoder, cache))


def summed_nll(model: Loaded, prompts: list[list[int]], chunk: int) -> list[float]:
    """For each prompt -sum of ln p(token | tokens before it), over its tokens after the first.

    The layers compute all prompts in one mixed batch, `chunk` tokens of each in a step; the head takes each
    prompt's rows together.
    """
    tables, next_block = [], 0
    for prompt in prompts:
        needed = -(-len(prompt) // BLOCK_SIZE)
        tables.append(tuple(range(next_block, next_block + needed))[::-1])
        next_block += needed
    states: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        going = [i for i, prompt in enumerate(prompts) if start < len(prompt)]
        seqs = tuple(
            ForwardSeq(RequestId(str(i)), tuple(prompts[i][start : start + chunk]), start, tables[i])
            for i in going
        )
        inputs = build_inputs(StepPlan(ForwardBatch(seqs), ()), block_size=BLOCK_SIZE, device=CPU)
        hidden = model.decoder.hidden(inputs.token_ids, inputs.positions, inputs.batch, model.cache.layers)
        first = 0
        for i, seq in zip(going, seqs, strict=True):
            states[i].append(hidden[first : first + len(seq.tokens)].clone())
            first += len(seq.tokens)
    return [
        _nll(model, torch.cat(rows)[:-1], prompt[1:]) for rows, prompt in zip(states, prompts, strict=True)
    ]


def _nll(model: Loaded, hidden: torch.Tensor, following: list[int]) -> float:
    logprobs = model.decoder.logits(hidden).log_softmax(-1)
    return -float(logprobs.gather(1, torch.tensor(following)[:, None]).double().sum())


def follow(model: Loaded, cases: list[Case], chunk: int) -> list[list[TokenLogprobs]]:
    """Greedy replies of all cases in one mixed batch, prefilled in chunks.

    Each step's token is replaced by the recorded one, so that a choice that may fall either way does not end
    the comparison; the caller compares what was sampled.
    """
    streams, next_block = [], 0
    for i, case in enumerate(cases):
        needed = -(-(len(case.prompt) + len(case.greedy)) // BLOCK_SIZE)
        blocks = tuple(range(next_block, next_block + needed))[::-1]
        streams.append(Stream(blocks, case.prompt, replace(GREEDY, logprobs=8), id=str(i)))
        next_block += needed
    replies: list[list[TokenLogprobs]] = [[] for _ in cases]
    while going := [i for i, case in enumerate(cases) if len(replies[i]) < len(case.greedy)]:
        step(model.runner, [(streams[i], chunk) for i in going])
        for i in going:
            if len(streams[i].sampled) > len(replies[i]):
                recorded = cases[i].greedy[len(replies[i])]
                replies[i].append(streams[i].sampled[-1])
                streams[i].sampled[-1] = TokenLogprobs(recorded)
    return replies


def differences(reply: list[TokenLogprobs], case: Case) -> list[str]:
    """Where a reply is not the recorded one; empty when it is.

    The last prompt position's five best ids must be there with their log-probabilities, and nothing may stand
    between or before them that is not as close as two runs of fp32 are. Then each token, except close calls.
    """
    top, recorded = dict(reply[0].top), dict(case.top)
    found = [
        f"logprob of {token}: {top.get(token)} instead of {logprob}"
        for token, logprob in case.top
        if abs(top.get(token, -torch.inf) - logprob) > 0.01
    ]
    fifth = case.top[-1][1]
    found += [
        f"{token} is not in the top 5"
        for token in top
        if token not in recorded and top[token] >= fifth + 0.01
    ]
    ranks = {token: rank for rank, token in enumerate(top)}
    found += [
        f"{worse} before {better}"
        for (better, high), (worse, low) in pairwise(case.top)
        if high - low >= 0.02 and ranks.get(better, 9) > ranks.get(worse, 9)
    ]
    found += [
        f"token {i}: {sampled.token} instead of {token} (margin {margin})"
        for i, (sampled, token, margin) in enumerate(zip(reply, case.greedy, case.margins, strict=True))
        if sampled.token != token and margin > LOW_MARGIN
    ]
    return found
