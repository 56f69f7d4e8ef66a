"""What a Prometheus server reads: every exported series, its name, and what feeds it.

`docs/metrics.md` lists them. Names and labels that vLLM has are vLLM's, so that its dashboards work; what
only Legato has is named `legato:`. The numbers come from `timeline`: there is no formula here.

What has to do with targets is in `target_series`.
"""

from collections.abc import Iterator, Mapping
from threading import Lock

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from legato.core.block_pool import BlockPool
from legato.core.lifecycle import FinishReason
from legato.core.request import Request, RequestId
from legato.core.schedule import Reason, Schedule
from legato.metrics.journal import StepRecord
from legato.metrics.series import Catalogue
from legato.metrics.target_series import TargetSeries
from legato.metrics.timeline import COMPLETE, NO_TARGETS, RequestTimeline, StepChanges, Targets, Timelines

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Upper bounds of the buckets: vLLM's, and finer ones, since vLLM's are too coarse for fast machines.
FAST = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05)
TTFT_BOUNDS = (
    *(*FAST, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
ITL_BOUNDS = (*FAST, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5),
    *(5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
LENGTH_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_BOUNDS = tuple(2**power for power in range(15))


class RequestSeries:
    """What requests lived through."""

    def __init__(self, new: Catalogue, targets: Targets) -> None:
        ttft_bounds, itl_bounds = with_bound(TTFT_BOUNDS, targets.ttft), with_bound(ITL_BOUNDS, targets.tpot)
        reasons = [(reason.value,) for reason in FinishReason]
        self._running = new.gauge("vllm:num_requests_running", "Requests that hold blocks.")
        self._waiting = new.gauge("vllm:num_requests_waiting", "Requests in the queue.")
        self._success = new.counter(
            "vllm:request_success_total", "Requests that ended, by reason.", ("finished_reason",), reasons
        )
        self._prompt_tokens = new.counter(
            "vllm:prompt_tokens_total", "Prompt tokens of requests that got their first token."
        )
        self._generation_tokens = new.counter("vllm:generation_tokens_total", "Tokens generated.")
        self._cache_queries = new.counter(
            "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the cache, once a request."
        )
        self._cache_hits = new.counter(
            "vllm:prefix_cache_hits_total", "Prompt tokens found in the cache, once a request."
        )
        self._recomputed_tokens = new.counter(
            "legato_recomputed_tokens_total", "Tokens computed again after a preemption."
        )
        self._ttft = new.histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token, of each request.", ttft_bounds
        )
        self._itl = new.histogram(
            "vllm:inter_token_latency_seconds", "Every gap between two tokens of a request.", itl_bounds
        )
        self._tpot = new.histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap of each complete reply.", itl_bounds
        )
        self._e2e = new.histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to finish, of each complete reply.", REQUEST_BOUNDS
        )
        self._queue = new.histogram(
            "vllm:request_queue_time_seconds", "Arrival to first admission, of each request.", REQUEST_BOUNDS
        )
        self._prefill = new.histogram(
            "vllm:request_prefill_time_seconds", "First admission to first token.", REQUEST_BOUNDS
        )
        self._decode = new.histogram(
            "vllm:request_decode_time_seconds", "First to last token, of complete replies.", REQUEST_BOUNDS
        )
        self._num_prompt = new.histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of each request that ended.", LENGTH_BOUNDS
        )
        self._num_generated = new.histogram(
            "vllm:request_generation_tokens", "Tokens generated for each request that ended.", LENGTH_BOUNDS
        )
        self._num_chunks = new.histogram(
            "legato_chunks_per_request",
            "Steps that worked on a prompt before its first token.",
            LENGTH_BOUNDS,
        )

    def counted(self, timelines: Timelines) -> None:
        self._running.set(timelines.num_running)
        self._waiting.set(timelines.num_waiting)

    def changed(self, changes: StepChanges) -> None:
        for timeline in changes.admitted:
            self._queue.observe(timeline.queue_time)
            self._cache_queries.add(timeline.num_prompt)
            self._cache_hits.add(timeline.num_cached)
        for timeline in changes.started:
            self._prompt_tokens.add(timeline.num_prompt)
            self._ttft.observe(timeline.ttft)
            self._prefill.observe(timeline.prefill_time)
            self._num_chunks.observe(timeline.num_chunks)
        for gap in changes.gaps:
            self._itl.observe(gap)
        self._generation_tokens.add(len(changes.started) + len(changes.gaps))
        self._recomputed_tokens.add(changes.recomputed)
        for timeline in changes.finished:
            if not timeline.num_generated and timeline.reason in COMPLETE:  # it asked for no reply
                self._prompt_tokens.add(timeline.num_prompt)
            self.ended(timeline)

    def ended(self, timeline: RequestTimeline) -> None:
        """Count a request that ended. A reply that was cut off has no times worth comparing."""
        if timeline.reason is None:
            return
        self._success.add(1, timeline.reason.value)
        self._num_prompt.observe(timeline.num_prompt)
        self._num_generated.observe(timeline.num_generated)
        if timeline.reason in COMPLETE:
            self._e2e.observe(timeline.e2e)
            self._decode.observe(timeline.decode_time)
            self._tpot.observe(timeline.tpot)


class StepSeries:
    """What steps did."""

    def __init__(self, new: Catalogue, *, budget: int, blocks: BlockPool) -> None:
        kinds = (("decode",), ("mixed",), ("prefill",))
        cache = (str(blocks.block_size), str(blocks.num_blocks))
        self._budget = new.gauge("legato_token_budget", "The most tokens a step may hold.")
        self._budget.set(budget)
        self._step_tokens = new.counter(
            "legato_step_tokens_total", "Tokens computed, by kind.", ("kind",), (("prefill",), ("decode",))
        )
        self._iteration_tokens = new.histogram(
            "vllm:iteration_tokens_total", "Tokens in each step.", STEP_BOUNDS
        )
        self._duration = new.histogram(
            "legato_step_duration_seconds", "Time of each step, by kind.", ITL_BOUNDS, ("kind",), kinds
        )
        self._failed = new.counter("legato_steps_failed_total", "Steps whose model run failed.")
        self._preemptions = new.counter("vllm:num_preemptions_total", "Preemptions.")
        self._usage = new.gauge("vllm:kv_cache_usage_perc", "Share of the blocks that are held, 0 to 1.")
        self._blocks_used = new.gauge("legato_blocks_used", "Blocks that requests hold.")
        self._blocks_cached = new.gauge(
            "legato_blocks_cached", "Blocks that no request holds and whose content may still be shared."
        )
        self._left_out = new.gauge(
            "legato_requests_left_out",
            "Requests without a token in the newest step, by reason.",
            ("reason",),
            [(reason.value,) for reason in Reason],
        )
        self._blocks_total = new.gauge("legato_blocks", "Blocks in the KV cache.")
        self._blocks_total.set(blocks.num_blocks)
        info = new.gauge(
            "vllm:cache_config_info", "The KV cache, as labels.", ("block_size", "num_gpu_blocks"), (cache,)
        )
        info.set(1, *cache)

    def stepped(self, record: StepRecord) -> None:
        """A failed step computed nothing; what it admitted and preempted happened."""
        schedule = record.schedule
        self._budget.set(record.schedule.token_budget)
        self._preemptions.add(len(schedule.preempted))
        self.held(record.blocks_used, record.blocks_cached, record.blocks_total)
        self.left_out(left_out_by_reason(record.schedule))
        if record.error is not None:
            self._failed.add(1)
        elif schedule.runs:
            self._step_tokens.add(schedule.num_prefill_tokens, "prefill")
            self._step_tokens.add(len(schedule.decodes), "decode")
            self._iteration_tokens.observe(schedule.num_tokens)
            self._duration.observe(record.elapsed, _kind(schedule))

    def left_out(self, counts: Mapping[Reason, int]) -> None:
        for reason, num in counts.items():
            self._left_out.set(num, reason.value)

    def held(self, used: int, cached: int, total: int) -> None:
        self._blocks_used.set(used)
        self._blocks_cached.set(cached)
        self._blocks_total.set(total)
        self._usage.set(used / total)


def with_bound(bounds: tuple[float, ...], target: float | None) -> tuple[float, ...]:
    """The target is a bound too: dashboards read the share that met it off the bucket."""
    return bounds if target is None else tuple(sorted({*bounds, target}))


def left_out_by_reason(schedule: Schedule) -> dict[Reason, int]:
    """How many requests a step left out for each reason."""
    counts = dict.fromkeys(Reason, 0)
    for reason in schedule.reasons.values():
        counts[reason] += 1
    if schedule.queue_reason is not None:
        counts[schedule.queue_reason] += schedule.num_not_examined
    return counts


def _kind(schedule: Schedule) -> str:
    if not schedule.chunks:
        return "decode"
    return "mixed" if schedule.decodes else "prefill"


class Metrics(Collector):
    """An observer of one engine, with a registry of its own.

    `submitted`, `stepped` and `aborted` are called in the engine's thread, `render` in any other.
    """

    def __init__(
        self,
        *,
        model_name: str,
        budget: int,
        blocks: BlockPool,
        targets: Targets = NO_TARGETS,
        engine: int = 0,
    ) -> None:
        """`blocks` is the engine's pool, `targets` are the server's own; `engine` tells engines apart that
        serve one model."""
        self._common = {"model_name": model_name, "engine": str(engine)}
        self._lock = Lock()
        self._timelines = Timelines(targets)
        catalogue = Catalogue()
        self._requests = RequestSeries(catalogue, targets)
        self._steps = StepSeries(catalogue, budget=budget, blocks=blocks)
        self._targets = TargetSeries(catalogue, targets)
        self._blocks = blocks
        self._series = tuple(catalogue.series)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def submitted(self, request: Request) -> None:
        with self._lock:
            self._timelines.submitted(request)

    def stepped(self, record: StepRecord) -> None:
        with self._lock:
            changes = self._timelines.stepped(record)
            self._requests.changed(changes)
            self._targets.changed(changes)
            self._steps.stepped(record)
            self._targets.stepped(record)

    def aborted(self, request_id: RequestId, reason: FinishReason, now: float) -> None:
        with self._lock:
            timeline = self._timelines.aborted(request_id, reason, now)
            if timeline is not None:
                self._requests.ended(timeline)
                self._targets.ended(timeline)
            blocks = self._blocks  # perhaps no step will come to say so
            self._steps.held(blocks.num_used, blocks.num_cached, blocks.num_blocks)
            if not self._timelines.num_running + self._timelines.num_waiting:
                self._steps.left_out(dict.fromkeys(Reason, 0))

    def collect(self) -> Iterator[Metric]:
        """Everything as it was between two steps. The engine waits for the copies, not for the text."""
        with self._lock:
            self._requests.counted(self._timelines)
            self._targets.counted()
            copies = [series.copy() for series in self._series]
        return (series.export(self._common) for series in copies)

    def render(self) -> bytes:
        """The page, in Prometheus' text format; its type is `CONTENT_TYPE`."""
        return generate_latest(self.registry)
