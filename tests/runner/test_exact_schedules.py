"""Bit-identical replies under the real scheduler: prefix hits, followers, preemptions, every order.

A random model with the CPU's exact layers and attention. Each request asks for the log-probability of every
token id, so that equal replies mean equal logits, bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from runner_steps import GEMMA, LLAMA, VOCAB, random_prompt, tiny_weights

from legato.attention.cpu import CpuAttention
from legato.core.block_pool import BlockPool
from legato.core.events import TokenEvent
from legato.core.invariants import check_schedule, check_state
from legato.core.output_lengths import OutputLengthEstimator
from legato.core.plan import plan
from legato.core.prefill_policy import Chunked, FillBudget, PrefillPolicy
from legato.core.request import Request, RequestId
from legato.core.schedule import Reason, Schedule
from legato.core.scheduler import Scheduler
from legato.core.scheduling_policy import Fair, Fcfs, Priority, SchedulingPolicy, Shortest
from legato.core.state import SchedulerConfig
from legato.core.step_plan import TokenLogprobs
from legato.models.decoder import Decoder
from legato.models.spec import ModelSpec
from legato.runner.backends import layer_ops
from legato.runner.kv_cache import KVCache
from legato.runner.runner import TorchRunner
from legato.sampling_params import SamplingParams

BLOCK = 4
SIZES = {"head_dim": 32, "intermediate_size": 64}
SPECS = {"llama": replace(LLAMA, **SIZES), "gemma": replace(GEMMA, **SIZES)}
OPS = layer_ops("w16")
ATTENTION = CpuAttention()
families = pytest.mark.parametrize("family", SPECS)
PREFIX = random_prompt(24, seed=99)


class Blind(OutputLengthEstimator):
    """Expects every reply to end at once, so that small pools run out."""

    def remaining(self, num_generated: int) -> float:  # noqa: ARG002
        return 1.0


@dataclass
class Bench:
    """A scheduler over a real runner, stepped until nothing is left."""

    spec: ModelSpec
    num_blocks: int = 64
    budget: int = 16
    order: SchedulingPolicy = field(default_factory=Fair)
    policy: PrefillPolicy = field(default_factory=FillBudget)
    prefix_cache: bool = True
    replies: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    schedules: list[Schedule] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_batch_tokens=self.budget,
            max_running=6,
            max_model_len=self.num_blocks * BLOCK,
            vocab_size=VOCAB,
            prefix_cache=self.prefix_cache,
        )
        pool = BlockPool(self.num_blocks, BLOCK)
        self.scheduler = Scheduler(
            config, pool, prefill_policy=self.policy, policy=self.order, output_lengths=Blind()
        )
        decoder = Decoder(self.spec, tiny_weights(self.spec), attention=ATTENTION, ops=OPS)
        cache = KVCache(
            self.spec,
            num_blocks=self.num_blocks,
            block_size=BLOCK,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.runner = TorchRunner(decoder, cache)

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 8, **params: object) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=VOCAB)
        request = Request(
            id=RequestId(name),
            prompt=tuple(prompt),
            params=replace(sampling, **params),  # type: ignore[arg-type]
            arrival=0.0,
        )
        self.scheduler.add(request)
        self.replies[name] = []

    def step(self) -> Schedule:
        schedule = self.scheduler.schedule(0.0)
        check_schedule(self.scheduler.state, schedule)
        self.scheduler.commit(schedule)
        for event in self.scheduler.complete(self.runner.run(plan(self.scheduler.state, schedule)), 0.0):
            assert isinstance(event, TokenEvent)
            self.replies[event.request_id].append(event.sampled)
            self.cached[event.request_id] = event.num_cached
        self.schedules.append(schedule)
        check_state(self.scheduler.state)
        return schedule

    def run(self) -> None:
        while self.scheduler.state.has_work:
            self.step()


def alone(
    spec: ModelSpec, prompt: Sequence[int], max_tokens: int = 8, **params: object
) -> list[TokenLogprobs]:
    """The reply of a run alone, in one piece, without any cache."""
    bench = Bench(spec, budget=1000, prefix_cache=False)
    bench.add("alone", prompt, max_tokens, **params)
    bench.run()
    return bench.replies["alone"]


@families
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_cold_warm_half_evicted_and_with_another_tail(family: str, prefix_cache: bool) -> None:
    """E-13, E-05, E-08: the same prompt of whole blocks three times, then with another tail; the control run
    has the cache off. E-03: log-probabilities are those of the reply, whatever was cached."""
    spec = SPECS[family]
    bench = Bench(spec, num_blocks=16, prefix_cache=prefix_cache)
    tail = [*PREFIX[:14], 5, 6, 7]
    expected, expected_tail = alone(spec, PREFIX), alone(spec, tail)
    for name in ("cold", "warm"):
        bench.add(name, PREFIX)
        bench.run()
    bench.add("tail", tail)
    bench.run()
    bench.add("evicts", random_prompt(40, seed=3), max_tokens=2)
    bench.run()
    bench.add("half", PREFIX)
    bench.run()
    for name in ("cold", "warm", "half"):
        assert bench.replies[name] == expected, name
    assert bench.replies["tail"] == expected_tail
    if prefix_cache:
        assert (bench.cached["cold"], bench.cached["warm"], bench.cached["tail"]) == (0, 20, 12)
        assert 0 < bench.cached["half"] < 20
    else:
        assert set(bench.cached.values()) == {0}


@families
@pytest.mark.parametrize("chunk", [3, 4, 7, 16])
def test_followers_and_prompts_that_come_together(family: str, chunk: int) -> None:
    """E-11, E-12: a common prefix of 6 blocks, computed in chunks while others wait for it."""
    spec = SPECS[family]
    bench = Bench(spec, policy=Chunked(chunk), budget=24)
    prompts = {f"r{i}": [*PREFIX, *random_prompt(1 + 3 * i, seed=i)] for i in range(4)}
    for name, prompt in prompts.items():
        bench.add(name, prompt)
    bench.run()
    assert any(Reason.PREFIX in schedule.reasons.values() for schedule in bench.schedules)
    assert sum(bench.cached.values()) > 0
    for name, prompt in prompts.items():
        assert bench.replies[name] == alone(spec, prompt), name


@families
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("order", [Fair(), Fcfs(), Shortest(1.0), Priority()], ids=lambda o: type(o).__name__)
def test_a_pool_in_which_all_are_preempted_gives_the_replies_of_runs_alone(
    family: str, prefix_cache: bool, order: SchedulingPolicy
) -> None:
    """E-14, D-14: only tails are lost where that is enough; seeds, penalties and counts survive."""
    spec = SPECS[family]
    bench = Bench(spec, num_blocks=13, budget=12, order=order, prefix_cache=prefix_cache)
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    ]
    wanted = {}
    for i in range(8):
        prompt = [*PREFIX[: 4 * (i % 3)], *random_prompt(6 + i, seed=i)]
        bench.add(f"r{i}", prompt, 20, **kinds[i % 2])
        wanted[f"r{i}"] = alone(spec, prompt, 20, **kinds[i % 2])
    while bench.scheduler.state.has_work:
        bench.step()
        bench.scheduler.state.caution = 0.0
    lost = [request_id for schedule in bench.schedules for request_id in schedule.preempted]
    assert len(set(lost)) >= 3
    again = [
        chunk.start
        for schedule in bench.schedules
        for chunk in schedule.chunks
        if chunk.request_id in schedule.admitted and chunk.request_id in lost
    ]
    assert any(start > 0 for start in again), "some came back to blocks of theirs that were left"
    for name, reply in wanted.items():
        assert bench.replies[name] == reply, name
