"""The exported page: numbers worked out by hand, gauges, whole scrapes, and vLLM's names and buckets."""

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import prometheus_client
import pytest
from metrics_rig import (
    COMMON,
    DECODE,
    E2E,
    ITL,
    PREFILL,
    QUEUE,
    TPOT,
    TTFT,
    assert_agrees_with_the_client,
    assert_buckets_are_whole,
    count_and_sum,
    make_world,
    scrape,
)

from legato.core.block_pool import BlockPool
from legato.core.budget import TargetBudget
from legato.core.lifecycle import FinishReason
from legato.core.step_plan import StepPlan
from legato.cost.cost_model import CostModel
from legato.metrics import prometheus
from legato.metrics.http_series import HttpSeries
from legato.metrics.process_series import ProcessSeries
from legato.metrics.prometheus import Metrics
from legato.metrics.timeline import Targets


def test_one_preempted_history_gives_the_numbers_worked_out_by_hand() -> None:
    """The history of `test_preemption_after_three_tokens_keeps_every_stamp`.

    Steps: 8 prompt tokens; 2, 2, 1, 1 decodes; 3 tokens of `b`, two of them again; 1 decode.
    """
    world = make_world(budget=8, num_blocks=6)
    world.submit("a", num_prompt=4, max_tokens=5)
    world.submit("b", num_prompt=4, max_tokens=5)
    world.run()
    sample = world.sample
    assert sample("vllm:num_preemptions_total") == 1
    assert sample("vllm:prompt_tokens_total") == 8
    assert sample("vllm:generation_tokens_total") == 10
    assert sample("legato_recomputed_tokens_total") == 2
    assert sample("legato_step_tokens_total", kind="prefill") == 11
    assert sample("legato_step_tokens_total", kind="decode") == 7
    assert count_and_sum(world, "vllm:iteration_tokens_total") == (7, 18)
    assert count_and_sum(world, "legato_step_duration_seconds", kind="prefill") == (2, 2)
    assert count_and_sum(world, "legato_step_duration_seconds", kind="decode") == (5, 5)
    assert count_and_sum(world, "legato_step_duration_seconds", kind="mixed") == (0, 0)
    assert count_and_sum(world, TTFT) == (2, 2)
    assert count_and_sum(world, ITL) == (8, 4 + 6)
    assert count_and_sum(world, TPOT) == (2, 1 + 1.5)
    assert count_and_sum(world, E2E) == (2, 5 + 7)
    assert count_and_sum(world, QUEUE) == (2, 0)
    assert count_and_sum(world, PREFILL) == (2, 2)
    assert count_and_sum(world, DECODE) == (2, 4 + 6)
    assert count_and_sum(world, "vllm:request_prompt_tokens") == (2, 8)
    assert count_and_sum(world, "vllm:request_generation_tokens") == (2, 10)
    assert count_and_sum(world, "legato_chunks_per_request") == (2, 2)
    assert sample(f"{ITL}_bucket", le="0.75") == 0
    assert sample(f"{ITL}_bucket", le="1.0") == 7  # a gap of exactly 1 s belongs to "at most 1 s"
    assert sample(f"{ITL}_bucket", le="2.5") == 7
    assert sample(f"{ITL}_bucket", le="5.0") == 8


def test_gauges_follow_the_engine_from_step_to_step() -> None:
    world = make_world(budget=4, max_running=1, num_blocks=10)
    assert world.sample("legato_token_budget") == 4
    assert world.sample("legato_blocks") == 10
    assert world.sample("vllm:cache_config_info", block_size="2", num_gpu_blocks="10") == 1
    for name in ("a", "b", "c"):
        world.submit(name, num_prompt=4, max_tokens=3)
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "legato_blocks_used")
    assert [world.sample(name) for name in gauges] == [0, 3, 0]
    world.step()
    assert [world.sample(name) for name in gauges] == [1, 2, 2]
    assert world.sample("vllm:kv_cache_usage_perc") == 0.2
    world.abort("a")
    world.abort("c")
    assert [world.sample(name) for name in gauges] == [0, 1, 0]
    world.abort("b")
    assert [world.sample(name) for name in gauges] == [0, 0, 0]


def test_steps_are_timed_by_what_is_in_them() -> None:
    world = make_world(budget=4, step_seconds=lambda plan: float(plan.batch.num_tokens))
    world.submit("a", num_prompt=4, max_tokens=4)
    world.step()  # 4 tokens of a prompt
    world.submit("b", num_prompt=3, max_tokens=1)
    world.run()  # a decode and a chunk of 3; two decodes
    assert count_and_sum(world, "legato_step_duration_seconds", kind="prefill") == (1, 4)
    assert count_and_sum(world, "legato_step_duration_seconds", kind="mixed") == (1, 4)
    assert count_and_sum(world, "legato_step_duration_seconds", kind="decode") == (2, 2)


def test_a_failed_step_counts_as_failed_and_its_requests_as_errors() -> None:
    def fails_once(_: StepPlan) -> float:
        if world.engine.scheduler.state.step == 2:
            raise RuntimeError("broken")
        return 1.0

    world = make_world(budget=4, max_running=1, step_seconds=fails_once)
    world.submit("lost", num_prompt=6, max_tokens=2)
    world.submit("next", num_prompt=2, max_tokens=1)
    world.run()
    assert world.sample("legato_steps_failed_total") == 1
    assert world.reasons() == {"stop": 0, "length": 1, "abort": 0, "timeout": 0, "error": 1, "constraint": 0}
    assert world.sample("legato_step_tokens_total", kind="prefill") == 4 + 2
    assert world.sample("vllm:prompt_tokens_total") == 2
    assert world.sample("vllm:iteration_tokens_total_count") == 2
    assert_agrees_with_the_client(world)


def test_a_stop_token_and_a_stop_string_are_both_stops() -> None:
    world = make_world()
    world.submit("token", num_prompt=2, max_tokens=9, stop_token_ids=frozenset({4}))  # (1 + 2) + 1 = 4
    world.submit("string", num_prompt=2, max_tokens=9)
    world.step()
    world.abort("string", FinishReason.STOP)
    assert world.reasons() == {"stop": 2, "length": 0, "abort": 0, "timeout": 0, "error": 0, "constraint": 0}
    assert world.sample(f"{TPOT}_count") == 0
    assert_agrees_with_the_client(world)


@pytest.fixture
def switch_threads_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("switch_threads_often")
def test_scrapes_in_another_thread_see_whole_steps_only() -> None:
    world = make_world(budget=32, max_running=32, num_blocks=2000)
    for i in range(32):
        world.submit(f"r{i}", num_prompt=1, max_tokens=100)
    pages: list[bytes] = []
    done = threading.Event()

    def keep_scraping() -> None:
        while not done.is_set():
            pages.append(world.metrics.render())

    scraper = threading.Thread(target=keep_scraping)
    scraper.start()
    world.run()
    done.set()
    scraper.join()
    assert pages
    labels = tuple(sorted(COMMON.items()))
    for page in (*pages, world.metrics.render()):
        value = {name: values.get(labels) for name, (_, values) in scrape(page).items()}
        assert value[f"{ITL}_sum"] == value[f"{ITL}_count"]  # every gap is one second
        assert value["vllm:generation_tokens_total"] == value[f"{TTFT}_count"] + value[f"{ITL}_count"]
        assert value["vllm:generation_tokens_total"] == value["vllm:iteration_tokens_total_sum"]
        assert_buckets_are_whole(page)
    assert value["vllm:generation_tokens_total"] == 3200


def test_a_scrape_under_way_does_not_see_the_step_that_comes_meanwhile() -> None:
    world = make_world()
    world.submit("r", num_prompt=2, max_tokens=2)
    world.step()
    under_way = world.metrics.collect()
    world.run()
    seen = {sample.name: sample.value for family in under_way for sample in family.samples}
    assert (seen[f"{TTFT}_count"], seen[f"{ITL}_count"]) == (1, 0)
    assert (seen["vllm:generation_tokens_total"], seen["vllm:num_requests_running"]) == (1, 1)
    assert world.sample("vllm:generation_tokens_total") == 2


def test_two_engines_share_nothing_and_the_library_s_global_registry_stays_empty_of_them() -> None:
    one, other = make_world(), make_world()
    one.submit("r", num_prompt=2, max_tokens=1)
    one.run()
    assert one.sample(f"{TTFT}_count") == 1
    assert other.sample(f"{TTFT}_count") == 0
    assert prometheus_client.REGISTRY.get_sample_value(f"{TTFT}_count", COMMON) is None


def test_a_model_name_with_quotes_and_newlines_is_escaped() -> None:
    name = 'a "b"\\c\nd'
    metrics = Metrics(model_name=name, budget=1, blocks=BlockPool(1, 1), engine=3)
    samples = scrape(metrics.render())
    labels = (("engine", "3"), ("model_name", name))
    assert samples["legato_token_budget"][1] == {labels: 1.0}


DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_exported_series_is_in_the_document_and_the_other_way_round() -> None:
    rows = re.findall(r"^\| `((?:vllm:|legato_)\w+)` \| (\w+) \| (.*?) \|", DOC.read_text(), re.MULTILINE)
    documented = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(documented) == len(rows)
    budget = TargetBudget(8, CostModel(), target=1.0)
    world = make_world(timed=budget, targets=Targets(ttft=1, tpot=1))
    world.submit("a", num_prompt=2, max_tokens=3)
    world.run()
    for beside in (HttpSeries(), ProcessSeries({"version": "1", "python": "3"}, lambda: (0, 0))):
        world.metrics.registry.register(beside)
    page = world.metrics.render()
    exported: dict[str, tuple[str, frozenset[str]]] = {}
    samples = scrape(page)
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", page.decode(), re.MULTILINE):
        if not name.startswith(("vllm:", "legato_")):
            continue
        one_sample = f"{name}_count" if kind == "histogram" else name
        [labels, *_] = samples[one_sample][1]
        exported[name] = (kind, frozenset(dict(labels)) - COMMON.keys())
    assert exported == documented


VLLM_BOUNDS = {
    TTFT: "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560",
    ITL: "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
    TPOT: "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
    E2E: "0.1 0.2 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    QUEUE: "0.1 0.2 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    PREFILL: "0.1 0.2 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    DECODE: "0.1 0.2 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "vllm:request_prompt_tokens": "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000",
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}


@pytest.mark.parametrize("name", VLLM_BOUNDS)
def test_buckets_hold_every_bound_of_vllm_and_latencies_start_at_a_millisecond(name: str) -> None:
    buckets = scrape(make_world().metrics.render())[f"{name}_bucket"][1]
    bounds = {float(dict(labels)["le"]) for labels in buckets}
    assert bounds >= {float(bound) for bound in VLLM_BOUNDS[name].split()}
    if name.endswith("_seconds"):
        assert bounds >= {0.001, 0.002, 0.003, 0.005, 0.0075}


def test_the_content_type_is_that_of_the_text_format() -> None:
    assert prometheus.CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_cache_hits_count_once_a_request_and_the_pool_tells_what_it_keeps() -> None:
    """Prompts of 5 tokens in blocks of 2, both 1 .. 5: the second finds the 4 tokens of 2 blocks."""
    world = make_world(prefix_cache=True)
    for name in ("first", "second"):
        world.submit(name, num_prompt=5, max_tokens=1)
        world.run()
    assert world.sample("vllm:prefix_cache_queries_total") == 10
    assert world.sample("vllm:prefix_cache_hits_total") == 4
    assert world.sample("vllm:prompt_tokens_total") == 10
    assert world.sample("legato_step_tokens_total", kind="prefill") == 5 + 1
    assert world.sample("legato_blocks_cached") == 2


def test_after_the_last_abort_the_gauges_show_an_idle_engine_and_what_it_keeps() -> None:
    """No step comes after it: prompts of 5 tokens in blocks of 2, one of them running, one waiting."""
    world = make_world(prefix_cache=True, max_running=1)
    for name in ("running", "waiting"):
        world.submit(name, num_prompt=5, max_tokens=9)
    world.step()
    assert (world.sample("legato_blocks_used"), world.sample("legato_blocks_cached")) == (3, 0)
    assert world.sample("legato_requests_left_out", reason="max_running") == 1
    world.abort("waiting")
    world.abort("running")
    assert (world.sample("legato_blocks_used"), world.sample("legato_blocks_cached")) == (0, 2)
    assert world.sample("vllm:kv_cache_usage_perc") == 0
    assert world.sample("legato_requests_left_out", reason="max_running") == 0


def test_everyone_left_out_of_the_newest_step_is_counted_by_reason() -> None:
    world = make_world(max_running=1)
    for i in range(100):
        world.submit(f"r{i}", num_prompt=2, max_tokens=3)
    world.step()
    assert world.sample("legato_requests_left_out", reason="max_running") == 99
    world.step()
    assert world.sample("legato_requests_left_out", reason="max_running") == 99
    assert world.sample("legato_requests_left_out", reason="blocks") == 0
