"""Log-probabilities of prompts under the real scheduler and exact layers: the same bits in every schedule,
those of a log-softmax over all logits of the prompt."""

from typing import Any

import pytest
import torch
from runner_steps import VOCAB, random_prompt, tiny_weights
from test_exact_schedules import ATTENTION, BLOCK, OPS, PREFIX, SPECS, Bench

from legato.core.events import PromptEvent
from legato.core.invariants import check_state
from legato.core.plan import plan
from legato.core.prefill_policy import Chunked
from legato.core.request import RequestId
from legato.core.step_plan import ForwardBatch, ForwardSeq, StepPlan, TokenLogprobs
from legato.models.decoder import Decoder
from legato.models.spec import ModelSpec
from legato.runner import score
from legato.runner.inputs import build_inputs
from legato.runner.kv_cache import KVCache

PROMPT = [*PREFIX, *random_prompt(13, seed=5)]
families = pytest.mark.parametrize("family", SPECS)


def scores(bench: Bench, *names: str) -> dict[str, list[TokenLogprobs]]:
    """Run until nothing is left; what was said of the prompts."""
    told: dict[str, list[TokenLogprobs]] = {name: [] for name in names}
    while bench.scheduler.state.has_work:
        schedule = bench.scheduler.schedule(0.0)
        bench.scheduler.commit(schedule)
        for event in bench.scheduler.complete(bench.runner.run(plan(bench.scheduler.state, schedule)), 0.0):
            if isinstance(event, PromptEvent):
                told[event.request_id] += event.scored
        check_state(bench.scheduler.state)
    return told


def scores_of(spec: ModelSpec, chunk: int, num_top: int = VOCAB) -> list[TokenLogprobs]:
    bench = Bench(spec, budget=64, policy=Chunked(chunk))
    bench.add("a", PROMPT, max_tokens=1, prompt_logprobs=num_top)
    return scores(bench, "a")["a"]


def reference(spec: ModelSpec, prompt: list[int]) -> torch.Tensor:
    """[len(prompt), V]: log-probabilities after each token, computed in one piece."""
    decoder = Decoder(spec, tiny_weights(spec), attention=ATTENTION, ops=OPS)
    cache = KVCache(spec, num_blocks=16, block_size=BLOCK, dtype=torch.float32, device=torch.device("cpu"))
    seq = ForwardSeq(RequestId("r"), tuple(prompt), 0, tuple(range(16)))
    inputs = build_inputs(StepPlan(ForwardBatch((seq,)), ()), block_size=BLOCK, device=torch.device("cpu"))
    rows = torch.arange(len(prompt))
    logits = decoder.forward(inputs.token_ids, inputs.positions, inputs.batch, cache.layers, rows)
    return logits.log_softmax(dim=-1)


@families
def test_they_are_those_of_all_logits_of_the_prompt(family: str) -> None:
    spec = SPECS[family]
    expected = reference(spec, PROMPT)
    entries = scores_of(spec, 64)
    assert [entry.token for entry in entries] == PROMPT[1:]
    for entry, row in zip(entries, expected, strict=False):
        assert entry.logprob == row[entry.token].item()
        assert entry.rank == 1 + int((row > row[entry.token]).sum())
        assert dict(entry.top) == dict(enumerate(row.tolist()))
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)


@families
def test_e_03_chunks_do_not_change_a_bit_of_them(family: str) -> None:
    expected = scores_of(SPECS[family], 64)
    for chunk in (1, 3, 4, 7, 16):
        assert scores_of(SPECS[family], chunk) == expected, chunk


def test_slices_do_not_change_a_bit_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["gemma"]
    expected = scores_of(spec, 64, num_top=3)
    for height in (1, 2, 5):
        monkeypatch.setattr(score, "SLICE", height * VOCAB)
        assert scores_of(spec, 64, num_top=3) == expected


@families
def test_batch_mates_a_warm_cache_and_preemptions_do_not_change_a_bit_of_them(family: str) -> None:
    spec = SPECS[family]
    bench = Bench(spec, num_blocks=24, budget=12)
    wanted: dict[str, Any] = {}
    bench.add("warms", PROMPT, max_tokens=1)
    for i in range(6):
        prompt = [*PREFIX[: 8 * (i % 3)], *random_prompt(10 + i, seed=i)]
        bench.add(f"r{i}", prompt, 16, prompt_logprobs=2)
        wanted[f"r{i}"] = prompt
    bench.add("again", PROMPT, 4, prompt_logprobs=2)
    wanted["again"] = PROMPT
    told = scores(bench, *wanted)
    for name, prompt in wanted.items():
        expected = reference(spec, prompt)
        assert [entry.logprob for entry in told[name]] == [
            row[token].item() for row, token in zip(expected, prompt[1:], strict=False)
        ], name
