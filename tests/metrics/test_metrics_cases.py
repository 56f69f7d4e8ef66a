"""Troubles that other servers had with their metrics, tried on ours; the client's own notes are the judge."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_rig import (
    COMMON,
    E2E,
    ITL,
    PREFILL,
    QUEUE,
    TTFT,
    World,
    assert_agrees_with_the_client,
    assert_buckets_are_whole,
    count_and_sum,
    make_world,
)

from legato.core.prefill_policy import Chunked, WholePrompt
from legato.core.step_plan import StepPlan
from legato.errors import RequestError
from legato.metrics.prometheus import Metrics

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 7), st.integers(2, 7)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        st.tuples(st.sampled_from(["step", "step", "step", "fail"]), st.just(0), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


def collect(metrics: Metrics) -> dict[tuple[str, str, tuple[str, ...]], float]:
    """Every sample, by the type of its family, its name and the values of its own labels."""
    return {
        (
            family.type,
            sample.name,
            tuple(v for k, v in sample.labels.items() if k not in COMMON),
        ): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }


@settings(deadline=None, max_examples=50)
@given(operations=OPERATIONS, policy=st.sampled_from([None, Chunked(2), WholePrompt()]))
def test_g_01_no_history_makes_a_counter_fall_or_an_observer_raise(
    operations: list[tuple[str, int, int]], policy: Chunked | WholePrompt | None
) -> None:
    """G-01: preemptions, aborts in any state, failed steps, ids that nobody knows. A scrape after each."""
    broken, computed = False, set[tuple[str, int]]()

    def step_seconds(plan: StepPlan) -> float:
        if broken:
            raise RuntimeError("broken")
        computed.update((s.request_id, s.start + i) for s in plan.batch.seqs for i in range(len(s.tokens)))
        return 0.25

    world = make_world(budget=4, num_blocks=7, policy=policy, step_seconds=step_seconds)
    scheduler = world.engine.scheduler
    before = collect(world.metrics)
    while operations or world.engine.has_work:
        what, first, second = operations.pop(0) if operations else ("step", 0, 0)
        if what == "submit":
            world.submit(f"r{len(world.tokens)}", num_prompt=first, max_tokens=second)
        elif what == "abort":
            world.abort(f"r{first}")
        elif world.engine.has_work:
            broken = what == "fail"
            world.step()
        after = collect(world.metrics)
        fallen = {key for key, value in after.items() if key[0] != "gauge" and value < before[key]}
        assert not fallen
        before = after
        assert after["gauge", "vllm:num_requests_running", ()] == len(scheduler.state.running)
        assert after["gauge", "vllm:num_requests_waiting", ()] == len(scheduler.state.waiting)
    assert_agrees_with_the_client(world)
    tokens = sum(world.sample("legato_step_tokens_total", kind=kind) for kind in ("prefill", "decode"))
    assert world.sample("legato_recomputed_tokens_total") == tokens - len(computed)
    prompts = sum(t.num_prompt for name, t in world.watcher.finished.items() if world.tokens[name])
    assert world.sample("vllm:prompt_tokens_total") == prompts


def test_g_02_histograms_hold_the_times_that_clients_saw() -> None:
    """G-02: 100 requests, steps of 50 ms."""
    world = make_world(budget=64, max_running=16, num_blocks=200, step_seconds=lambda _: 0.05)
    for i in range(100):
        world.submit(f"r{i}", num_prompt=8, max_tokens=1 + i % 7)
        if i % 3 == 0:
            world.step()
    world.run()
    assert_agrees_with_the_client(world)
    assert world.sample(f"{TTFT}_count") == 100
    assert world.sample(f"{ITL}_count") == sum(len(times) - 1 for times in world.tokens.values())
    assert world.sample(f"{ITL}_bucket", le="0.04") == 0
    assert world.sample(f"{ITL}_bucket", le="0.075") == world.sample(f"{ITL}_count")
    assert_buckets_are_whole(world.metrics.render())


def test_g_04_aborted_requests_are_counted_and_queued_ones_add_no_latency() -> None:
    """G-04: 10 normal, 5 aborted while decoding, 3 aborted in the queue, 2 refused."""
    world = make_world(budget=64, max_running=15, num_blocks=200)
    for i in range(10):
        world.submit(f"normal{i}", num_prompt=4, max_tokens=5)
    for i in range(5):
        world.submit(f"decoding{i}", num_prompt=4, max_tokens=50)
    for i in range(3):
        world.submit(f"queued{i}", num_prompt=4, max_tokens=5)
    for i in range(2):
        with pytest.raises(RequestError):
            world.submit(f"refused{i}", num_prompt=2000, max_tokens=5)
    world.step(3)
    for name in [name for name in world.tokens if not name.startswith("normal")]:
        world.abort(name)
    world.run()
    assert world.reasons() == {"stop": 0, "length": 10, "abort": 8, "timeout": 0, "error": 0, "constraint": 0}
    assert world.sample(f"{TTFT}_count") == world.sample(f"{QUEUE}_count") == 15
    assert world.sample(f"{E2E}_count") == 10
    assert world.sample("vllm:generation_tokens_total") == 10 * 5 + 5 * 3
    assert count_and_sum(world, "vllm:request_generation_tokens") == (18, 65)
    assert_agrees_with_the_client(world)


@pytest.mark.parametrize(
    ("make", "a", "b", "times_b"),
    [
        (lambda: make_world(budget=4, num_blocks=9, policy=Chunked(2)), (2, 7), (12, 2), [8.0, 9.0]),
        (lambda: make_world(budget=8, num_blocks=6), (4, 5), (4, 5), [1.0, 2.0, 3.0, 6.0, 7.0]),
    ],
    ids=["before its first token", "after three tokens"],
)
def test_g_05_a_preempted_request_has_one_ttft_and_one_long_gap(
    make: Callable[[], World], a: tuple[int, int], b: tuple[int, int], times_b: list[float]
) -> None:
    """G-05: the numbers are those of the tokens that the client saw; `a` runs alone meanwhile."""
    world = make()
    world.submit("a", *a)
    world.submit("b", *b)
    world.run()
    assert world.tokens["b"] == times_b
    assert world.sample("vllm:num_preemptions_total") == 1
    assert world.sample(f"{TTFT}_count") == 2
    assert world.sample(f"{ITL}_count") == a[1] - 1 + b[1] - 1
    assert world.sample("vllm:prompt_tokens_total") == a[0] + b[0]
    assert_agrees_with_the_client(world)


def test_g_10_a_thousand_requests_at_once_give_a_thousand_samples() -> None:
    """G-10: TTFT grows with the queue, and every request with a token is in it."""
    world = make_world(budget=256, max_running=64, num_blocks=400, step_seconds=lambda _: 0.125)
    for i in range(1024):
        world.submit(f"r{i}", num_prompt=4, max_tokens=2)
    world.run()
    # 64 at a time, two steps each: the k-th group has its first token at 0.125 + 0.25 k, k = 0 .. 15
    assert count_and_sum(world, TTFT) == (1024, sum(64 * (0.125 + 0.25 * k) for k in range(16)))
    assert_agrees_with_the_client(world)


def test_g_10_a_prompt_that_is_only_scored_counts_and_has_no_first_token() -> None:
    world = make_world()
    world.submit("scored", num_prompt=6, max_tokens=0, prompt_logprobs=1)
    world.submit("replied", num_prompt=4, max_tokens=1, prompt_logprobs=1)
    world.run()
    assert count_and_sum(world, TTFT)[0] == 1
    assert count_and_sum(world, E2E)[0] == 2
    assert world.sample("vllm:prompt_tokens_total") == 10
    assert world.sample("vllm:generation_tokens_total") == 1
    assert world.sample("vllm:request_success_total", finished_reason="length") == 2


def test_g_11_ttft_holds_the_wait_in_the_queue() -> None:
    """G-11: one at a time, 20 requests at once, each of one second."""
    world = make_world(max_running=1)
    for i in range(20):
        world.submit(f"r{i}", num_prompt=4, max_tokens=1)
    world.run()
    assert count_and_sum(world, TTFT) == (20, sum(range(1, 21)))
    assert count_and_sum(world, QUEUE) == (20, sum(range(20)))
    assert count_and_sum(world, PREFILL) == (20, 20)
    assert world.sample(f"{TTFT}_bucket", le="1.0") == 1
