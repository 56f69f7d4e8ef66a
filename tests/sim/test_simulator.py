"""The simulator decides nothing: its schedules are those of an engine that computes, to the byte."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_rig import Lines, known_costs, serve_for_real

from legato.config import EngineSettings
from legato.core.scheduling_policy import SCHEDULING_POLICIES
from legato.cost.cost_model import PRIOR
from legato.sim.run import new_scheduler, run_simulation
from legato.sim.simulator import simulate
from legato.sim.times import StepTimes
from legato.workload.arrival import Arrival, Part
from legato.workload.scenario import Group, Scenario

COSTS = known_costs()

ARRIVAL = st.builds(
    Arrival,
    time=st.floats(0, 2).map(lambda seconds: round(seconds, 2)),
    parts=st.lists(st.builds(Part, st.sampled_from("abc"), st.integers(1, 30)), min_size=1, max_size=3).map(
        tuple
    ),
    output_length=st.integers(1, 20),
    priority=st.integers(-1, 1),
    tpot_target=st.none() | st.floats(0.001, 0.3),
    patience=st.none() | st.floats(0.01, 2).map(lambda seconds: round(seconds, 2)),
)
SETTINGS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(SCHEDULING_POLICIES)),
        "tpot_target_ms": st.sampled_from([0.0, 1.0, 30.0, 60.0, 200.0]),
        "max_batch_tokens": st.integers(4, 40),
        "max_running": st.integers(1, 4),
        "prefill_chunk": st.sampled_from([None, 0, 7]),
        "min_chunk": st.integers(1, 8),
        "num_blocks": st.integers(6, 30),
        "block_size": st.integers(2, 8),
        "admission": st.sampled_from(["expected", "strict"]),
        "prefix_cache": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(SETTINGS, st.lists(ARRIVAL, min_size=1, max_size=14), st.lists(st.floats(0.5, 3), max_size=5))
def test_a_history_makes_the_schedules_that_an_engine_makes(
    given_settings: dict[str, object], arrivals: list[Arrival], ratios: list[float]
) -> None:
    """All orders and admissions, targets and none, pools so small that requests are preempted or refused,
    clients that leave, steps of any length."""
    engine = EngineSettings.model_validate(given_settings)
    arrivals = sorted(arrivals, key=lambda arrival: arrival.time)
    real = serve_for_real(
        new_scheduler(engine, COSTS, COSTS.cost_model()), arrivals, StepTimes(PRIOR, ratios, seed=7)
    )
    simulated = Lines()
    refused = simulate(
        new_scheduler(engine, COSTS, COSTS.cost_model()),
        arrivals,
        StepTimes(PRIOR, ratios, seed=7),
        observers=[simulated],
    )
    assert "\n".join(simulated.lines) == "\n".join(line for line in real if "refused" not in line)
    assert [f"{number} refused" for number, _ in refused] == [line for line in real if "refused" in line]


def test_time_passes_by_formula() -> None:
    arrivals = [
        Arrival(time=5.0, parts=(Part("a", 100),), output_length=3),
        Arrival(time=60.0, parts=(Part("b", 50),), output_length=1),
    ]
    simulation = run_simulation(EngineSettings(), COSTS, arrivals, noise=False)
    steps, cost = simulation.steps, COSTS.cost_model().cost
    assert list(steps.num_prefill) == [100, 0, 0, 50]
    assert list(steps.start)[0::3] == [5.0, 60.0]
    first, second = simulation.ended
    assert first.ttft == pytest.approx(
        cost.step + cost.head + 100 * cost.prefill + 100**2 * cost.pair, rel=0.05
    )
    assert second.ttft == pytest.approx(
        cost.step + cost.head + 50 * cost.prefill + 50**2 * cost.pair, rel=0.05
    )
    assert first.itl == tuple(steps.elapsed[1:3])


def test_the_same_seed_gives_the_same_times_and_another_others() -> None:
    arrivals = Scenario(description="", groups=(Group(requests=3, prompt=50, output=20),)).arrivals(0)
    noisy = COSTS.model_copy(
        update={
            "samples": tuple(
                s.model_copy(update={"seconds": s.seconds * (1 + i % 3)}) for i, s in enumerate(COSTS.samples)
            )
        }
    )
    one, again, other = (
        list(run_simulation(EngineSettings(), noisy, arrivals, seed=seed).steps.elapsed) for seed in (1, 1, 2)
    )
    assert one == again != other


def test_what_can_never_be_served_is_refused_and_the_rest_served() -> None:
    arrivals = [Arrival(time=0, parts=(Part("a", n),), output_length=2) for n in (100, 20_000, 50)]
    simulation = run_simulation(EngineSettings(), COSTS, arrivals)
    [refused] = simulation.refused
    assert refused.number == 1
    assert "8192" in refused.reason
    assert len(simulation.ended) == 2


def test_a_target_of_its_own_rules_the_steps_beside_it() -> None:
    """Prompts beside the strict stream come in small chunks; without it in large ones."""

    def longest_gap(target: float | None) -> float:
        stream = Arrival(time=0, parts=(Part("a", 32),), output_length=60, tpot_target=target)
        prompt = Arrival(time=0.5, parts=(Part("b", 2000),), output_length=1)
        simulation = run_simulation(
            EngineSettings(tpot_target_ms=0, max_batch_tokens=512), COSTS, [stream, prompt], noise=False
        )
        return max(gap for one in simulation.ended for gap in one.itl)

    assert longest_gap(None) > 0.5
    assert longest_gap(0.1) <= 0.1


def test_a_simulated_step_costs_no_more_than_a_few_thousand_operations() -> None:
    """Compared with a plain loop in the same process, so that neither a slow nor a busy machine fails it."""
    groups = (Group(requests=8, prompt=64, output=600), Group(rate=0.5, duration=10, prompt=1000, output=8))
    arrivals = Scenario(description="", groups=groups).arrivals(0)
    began = time.process_time()
    simulation = run_simulation(EngineSettings(), COSTS, arrivals)
    simulated = time.process_time()
    total = 0
    for i in range(2_000_000):
        total += i
    looped = time.process_time()
    operations_per_step = (simulated - began) / len(simulation.steps) / (looped - simulated) * 2_000_000
    assert operations_per_step < 10_000
