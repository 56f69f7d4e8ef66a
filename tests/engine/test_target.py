"""The target from settings to gaps: a calibrated engine on a fake runner that obeys known prices."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.config import EngineSettings
from legato.core.block_pool import BlockPool
from legato.core.request import Request, RequestId
from legato.core.step_plan import StepPlan
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepCost, shape_of
from legato.engine.calibration import calibrate
from legato.engine.engine import Engine
from legato.engine.fake import FakeRunner
from legato.engine.scheduling import automatic_target, make_scheduler, resolve_target, scheduler_config
from legato.metrics.timeline import RequestTimeline, Targets, Timelines
from legato.sampling_params import SamplingParams

TRUE = StepCost(step=0.012, head=0.006, decode=1.5e-3, prefill=6e-4, context=3e-7, pair=4e-8)
VOCAB, STREAMS, LONG = 250, 8, 2_000


class Clock:
    """Moves only while the runner sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Machine:
    """A fake runner with a clock; each step takes what the prices say, give or take 2 %."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.slower = 1.0
        self._draw = random.Random(0)
        self.runner = FakeRunner(
            num_blocks=512, block_size=32, vocab_size=VOCAB, step_seconds=self.seconds, sleep=self.clock.sleep
        )

    def seconds(self, plan: StepPlan) -> float:
        return self.slower * TRUE.seconds(plan.shape) * self._draw.lognormvariate(0, 0.02)


class Ended:
    """An observer that keeps the timelines of requests that ended."""

    def __init__(self, targets: Targets) -> None:
        self.timelines = Timelines(targets)
        self.ended: dict[str, RequestTimeline] = {}
        self.submitted = self.timelines.submitted
        self.aborted = self.timelines.aborted

    def stepped(self, record: object) -> None:
        changes = self.timelines.stepped(record)  # type: ignore[arg-type]
        self.ended |= {timeline.request_id: timeline for timeline in changes.finished}


def start(machine: Machine, **settings: object) -> tuple[Engine, Ended]:
    """As a server starts: calibrated if there is a target."""
    given = EngineSettings(**settings)  # type: ignore[arg-type]
    config = scheduler_config(given, max_model_len=8_192, vocab_size=VOCAB)
    costs = CostModel(calibrate(machine.runner, config, max_seconds=8.0, clock=machine.clock))
    given = resolve_target(given, costs)
    engine = Engine.on_runner(
        make_scheduler(given, config, BlockPool(512, 32), costs), machine.runner, clock=machine.clock
    )
    ended = Ended(Targets(tpot=given.tpot_target))
    engine.observe(ended)
    return engine, ended


def submit(engine: Engine, name: str, num_prompt: int, max_tokens: int, **terms: float) -> None:
    prompt = tuple(random.Random(name).randrange(VOCAB) for _ in range(num_prompt))
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    engine.submit(
        Request(id=RequestId(name), prompt=prompt, params=params, arrival=engine.clock(), **terms)  # type: ignore[arg-type]
    )


def run(engine: Engine, ended: Ended, until: str) -> None:
    while until not in ended.ended:
        engine.step()


def serve_a_long_prompt(machine: Machine, **settings: object) -> tuple[list[float], float]:
    """The gaps of streams while a long prompt arrives, and its TTFT."""
    engine, ended = start(machine, **settings)
    for i in range(STREAMS):
        submit(engine, f"s{i}", 64, 120)
    for _ in range(20):
        engine.step()
    submit(engine, "long", LONG, 1)
    run(engine, ended, "long")
    while engine.has_work:
        engine.step()
    gaps = [gap for name, timeline in ended.ended.items() if name != "long" for gap in timeline.itl]
    long = ended.ended["long"].ttft
    assert long is not None
    return gaps, long


@pytest.mark.parametrize("first_s", [0.0, 9.0, 500.0])
def test_a_first_step_that_sets_much_up_leaves_time_to_calibrate(first_s: float) -> None:
    """Kernels may have to be compiled for longer than all the measuring may take."""
    machine = Machine()
    slow = [first_s]
    machine.runner._step_seconds = lambda plan: slow.pop() if slow else TRUE.seconds(plan.shape)
    config = scheduler_config(EngineSettings(), max_model_len=8_192, vocab_size=VOCAB)
    samples = calibrate(machine.runner, config, max_seconds=8.0, clock=machine.clock)
    assert len(samples) > 20
    assert max(seconds for _, seconds in samples) < 1


@pytest.mark.parametrize("slower", [0.1, 1.0, 10.0, 30.0])
def test_a_machine_of_any_speed_is_calibrated(slower: float) -> None:
    """Within 90 s, even where a step of one decode takes 0.6 s: what steps cost, as far as they were short
    enough to be measured, and a target that leaves prompts their share of them."""
    machine = Machine()
    machine.slower = slower
    settings = EngineSettings()
    config = scheduler_config(settings, max_model_len=8_192, vocab_size=VOCAB)
    costs = CostModel(calibrate(machine.runner, config, max_seconds=8.0, clock=machine.clock))
    assert machine.clock.now < 90
    for runs in ([(511, 1, True)], [(511, 1, True)] * 8, [(511, 1, True)] * 8 + [(0, 64, False)]):
        shape = shape_of(runs)
        assert costs.cost.seconds(shape) == pytest.approx(slower * TRUE.seconds(shape), rel=0.15)
    target = resolve_target(settings, costs).tpot_target
    eight = slower * TRUE.seconds(shape_of([(511, 1, True)] * 8))
    assert target == pytest.approx(min(max(0.2, eight / 0.3), 6 * eight), rel=0.2)


@given(
    st.builds(
        StepCost,
        **{name: st.floats(1e-6, 0.1) for name in ("step", "head", "decode", "prefill")},
        context=st.floats(0, 1e-5),
        pair=st.floats(0, 1e-6),
    ),
    st.floats(1, 1.5),
    st.integers(1, 64),
)
def test_the_automatic_target_is_comfortable_or_leaves_prompts_their_share(
    cost: StepCost, margin: float, max_decodes: int
) -> None:
    """Beside eight decodes, or all that may run, prompts get 70 to 83 % of a step that keeps to it."""
    model = CostModel(prior=cost)
    model.margin = margin
    alone = margin * cost.seconds(shape_of([(511, 1, True)] * min(8, max_decodes)))
    target = automatic_target(model, max_decodes)
    share = 1 - alone / target
    assert 0.7 - 1e-9 <= share <= 5 / 6 + 1e-9
    assert target == 0.2 or share == pytest.approx(0.7 if target > 0.2 else 5 / 6)


@pytest.mark.parametrize("target_ms", [60, 100, 200])
def test_no_gap_exceeds_the_target_while_a_long_prompt_arrives(target_ms: float) -> None:
    """Eight decodes take 30 ms. And the prompt takes what the target leaves, about."""
    gaps, ttft = serve_a_long_prompt(Machine(), tpot_target_ms=target_ms)
    target = target_ms / 1000
    assert sum(gap > 1.1 * target for gap in gaps) <= 0.01 * len(gaps)
    assert max(gaps) < 1.5 * target
    num_steps = LONG * TRUE.prefill / (target - TRUE.step - TRUE.head - STREAMS * TRUE.decode)
    assert ttft < 1.35 * num_steps * target


def test_a_fixed_budget_without_a_target_does_what_it_always_did() -> None:
    gaps, _ = serve_a_long_prompt(Machine(), max_batch_tokens=256, tpot_target_ms=0)
    assert max(gaps) == pytest.approx(TRUE.step + TRUE.head + 8 * TRUE.decode + 248 * TRUE.prefill, rel=0.3)


def test_a_request_with_a_target_of_its_own_is_protected_on_any_server() -> None:
    """The server has none. While the strict one decodes gaps are short, later as long as ever."""
    engine, ended = start(Machine(), max_batch_tokens=512, tpot_target_ms=0)
    submit(engine, "loose", 64, 120)
    submit(engine, "strict", 64, 40, tpot_target=0.05)
    for _ in range(5):
        engine.step()
    submit(engine, "long", 6_000, 1)
    while engine.has_work:
        engine.step()
    strict, loose = ended.ended["strict"], ended.ended["loose"]
    assert max(strict.itl) < 0.05 * 1.1
    assert strict.met_targets is (max(strict.itl) <= 0.05)
    assert loose.met_targets is None
    assert max(loose.itl) > 0.25


def test_a_machine_that_becomes_slower_in_the_middle_is_kept_up_with() -> None:
    """Half as slow again, and contexts that grow: what is late is late within twenty steps of the change."""
    machine = Machine()
    engine, ended = start(machine, tpot_target_ms=120)
    for i in range(STREAMS):
        submit(engine, f"s{i}", 64, 200)
    for _ in range(20):
        engine.step()
    submit(engine, "first", 7_000, 1)
    for _ in range(10):
        engine.step()
    machine.slower, changed = 1.5, machine.clock.now
    run(engine, ended, "first")
    submit(engine, "second", 7_000, 1)
    while engine.has_work:
        engine.step()
    late = [
        after - changed
        for name, timeline in ended.ended.items()
        if name.startswith("s")
        for before, after in zip(timeline.token_times, timeline.token_times[1:], strict=False)
        if after - before > 1.1 * 0.120
    ]
    assert min(late, default=1.0) > 0
    assert max(late, default=0.0) < 20 * 0.120 * 1.5
