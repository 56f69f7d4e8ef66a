"""A real engine on a fake runner and a fake clock, watched by `Timelines`, by `Metrics`, and by a client that
keeps its own stamps of what `Engine.step` gives it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from legato.core.block_pool import BlockPool
from legato.core.budget import Budget
from legato.core.events import Event, ProgressEvent, PromptEvent, TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.output_lengths import OutputLengthEstimator
from legato.core.prefill_policy import PrefillPolicy
from legato.core.request import Request, RequestId
from legato.core.scheduler import Scheduler
from legato.core.scheduling_policy import Fcfs
from legato.core.state import SchedulerConfig
from legato.core.step_plan import StepPlan
from legato.engine.engine import Engine
from legato.engine.fake import FakeRunner
from legato.metrics.journal import StepRecord
from legato.metrics.prometheus import Metrics
from legato.metrics.timeline import NO_TARGETS, RequestTimeline, StepChanges, Targets, Timelines
from legato.sampling_params import SamplingParams

COMMON = {"model_name": "fake", "engine": "0"}
TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"
E2E = "vllm:e2e_request_latency_seconds"
QUEUE = "vllm:request_queue_time_seconds"
PREFILL = "vllm:request_prefill_time_seconds"
DECODE = "vllm:request_decode_time_seconds"


class FakeClock:
    """Stands still, but for `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class NoForesight(OutputLengthEstimator):
    """Expects every reply to end with the next token but one, so that pools run out."""

    def remaining(self, num_generated: int) -> float:  # noqa: ARG002
        return 2.0


class Watcher:
    """An observer that keeps everything `Timelines` hands out."""

    def __init__(self) -> None:
        self.timelines = Timelines()
        self.changes: list[StepChanges] = []
        self.finished: dict[str, RequestTimeline] = {}

    def submitted(self, request: Request) -> None:
        self.timelines.submitted(request)

    def stepped(self, record: StepRecord) -> None:
        self.changes.append(self.timelines.stepped(record))
        self.finished |= {timeline.request_id: timeline for timeline in self.changes[-1].finished}

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:
        timeline = self.timelines.aborted(request_id, reason, now)
        if timeline is not None:
            self.finished[request_id] = timeline


@dataclass
class World:
    """`tokens` and `ends` are the client's own notes: when each token came, and how it ended."""

    engine: Engine
    clock: FakeClock
    watcher: Watcher
    metrics: Metrics
    tokens: dict[str, list[float]] = field(default_factory=dict)
    arrivals: dict[str, float] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)

    def submit(
        self,
        name: str,
        num_prompt: int,
        max_tokens: int,
        *,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
        **params: object,
    ) -> None:
        request = Request(
            id=RequestId(name),
            prompt=tuple(range(1, num_prompt + 1)),
            params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
            arrival=self.clock.now,
            ttft_target=ttft_target,
            tpot_target=tpot_target,
        )
        self.engine.submit(request)
        self.tokens[name] = []
        self.arrivals[name] = request.arrival

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._see(self.engine.step())

    def abort(self, name: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self._see(self.engine.abort(RequestId(name), reason))

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def sample(self, name: str, **labels: str) -> float:
        """The exported value of one sample, as a scrape would find it."""
        value = self.metrics.registry.get_sample_value(name, COMMON | labels)
        assert value is not None, f"no sample {name} {labels}"
        return value

    def reasons(self) -> dict[str, float]:
        name = "vllm:request_success_total"
        return {reason.value: self.sample(name, finished_reason=reason.value) for reason in FinishReason}

    def expected_reasons(self) -> dict[str, int]:
        """The same, from the client's notes."""
        seen = Counter(self.ends.values())
        return {reason.value: seen[reason] for reason in FinishReason}

    def _see(self, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, PromptEvent | ProgressEvent):
                continue
            if isinstance(event, TokenEvent):
                self.tokens[event.request_id].append(self.clock.now)
            end = event.finish if isinstance(event, TokenEvent) else event.reason
            if end is not None:
                self.ends[event.request_id] = end


def make_world(
    *,
    budget: int = 8,
    max_running: int = 4,
    num_blocks: int = 64,
    block_size: int = 2,
    policy: PrefillPolicy | None = None,
    step_seconds: Callable[[StepPlan], float] = lambda _: 1.0,
    prefix_cache: bool = False,
    timed: Budget | None = None,
    targets: Targets = NO_TARGETS,
) -> World:
    """First come, first served and without foresight, to be followed by hand.

    Steps take one second, unless `step_seconds` says otherwise; powers of two keep sums exact.
    """
    clock = FakeClock()
    watcher = Watcher()
    config = SchedulerConfig(
        max_batch_tokens=budget,
        max_running=max_running,
        max_model_len=1000,
        vocab_size=100,
        prefix_cache=prefix_cache,
    )
    runner = FakeRunner(
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=100,
        step_seconds=step_seconds,
        sleep=clock.sleep,
    )
    pool = BlockPool(num_blocks, block_size)
    metrics = Metrics(model_name="fake", budget=budget, blocks=pool, targets=targets)
    scheduler = Scheduler(
        config, pool, prefill_policy=policy, budget=timed, policy=Fcfs(), output_lengths=NoForesight()
    )
    engine = Engine.on_runner(scheduler, runner, clock=clock)
    engine.observe(watcher)
    engine.observe(metrics)
    return World(engine, clock, watcher, metrics)


def scrape(page: bytes) -> dict[str, tuple[str, dict[tuple[tuple[str, str], ...], float]]]:
    """Sample name -> type of its family, and value by labels. `_bucket`, `_sum`, `_count` are names too."""
    samples: dict[str, tuple[str, dict[tuple[tuple[str, str], ...], float]]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            kind, values = samples.setdefault(sample.name, (family.type, {}))
            assert kind == family.type
            values[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def count_and_sum(world: World, name: str, **labels: str) -> tuple[float, float]:
    return world.sample(f"{name}_count", **labels), world.sample(f"{name}_sum", **labels)


def assert_agrees_with_the_client(world: World) -> None:
    """The histograms of latencies against the client's stamps; all requests have ended."""
    firsts = [times[0] - world.arrivals[name] for name, times in world.tokens.items() if times]
    gaps = [b - a for times in world.tokens.values() for a, b in pairwise(times)]
    complete = [n for n, end in world.ends.items() if end in (FinishReason.STOP, FinishReason.LENGTH)]
    ends = [world.tokens[name][-1] - world.arrivals[name] for name in complete]
    assert count_and_sum(world, TTFT) == (len(firsts), pytest.approx(sum(firsts)))
    assert count_and_sum(world, ITL) == (len(gaps), pytest.approx(sum(gaps)))
    assert count_and_sum(world, E2E) == (len(ends), pytest.approx(sum(ends)))
    assert world.sample("vllm:generation_tokens_total") == sum(map(len, world.tokens.values()))
    assert world.reasons() == world.expected_reasons()
    assert sum(world.reasons().values()) == len(world.tokens)
    for name in ("running", "waiting"):
        assert world.sample(f"vllm:num_requests_{name}") == 0
    assert world.sample("legato_blocks_used") == world.sample("vllm:kv_cache_usage_perc") == 0


def assert_buckets_are_whole(page: bytes) -> None:
    """Cumulative, and the last bucket holds them all."""
    samples = scrape(page)
    names = [name.removesuffix("_bucket") for name in samples if name.endswith("_bucket")]
    assert len(names) > 10
    for name in names:
        buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for labels, value in samples[f"{name}_bucket"][1].items():
            le = float(dict(labels)["le"])
            others = tuple(pair for pair in labels if pair[0] != "le")
            buckets.setdefault(others, []).append((le, value))
        for others, pairs in buckets.items():
            counts = [count for _, count in sorted(pairs)]
            assert counts == sorted(counts), name
            assert counts[-1] == samples[f"{name}_count"][1][others], name
