"""Long random histories against the law and against a slow, obvious oracle."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rig import NoForesight, Rig, build_rig, expected_reply

from legato.core.admission import MAX_PREEMPTIONS
from legato.core.budget import TargetBudget
from legato.core.events import FinishEvent
from legato.core.invariants import check_state
from legato.core.lifecycle import FinishReason
from legato.core.output_lengths import OutputLengthEstimator
from legato.core.prefill_policy import Chunked, FillBudget, WholePrompt
from legato.core.prompt_order import OVERDUE_STEPS
from legato.core.request import Request, RequestId
from legato.core.scheduling_policy import Fair, Fcfs, Priority, SchedulingPolicy, Shortest
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepCost
from legato.errors import ContextLengthError

POLICIES = st.one_of(st.integers(1, 9).map(Chunked), st.just(FillBudget()), st.just(WholePrompt()))
SCHEDULING_POLICIES = st.sampled_from([Fcfs(), Fair(), Shortest(0.5), Priority()])
TRUE = StepCost(step=1.0, head=0.5, decode=0.25, prefill=0.5, context=0.01, pair=0.01)
"""What steps cost on the clock of the histories."""
BELIEVED = StepCost(step=2.0, head=0.0, decode=0.5, prefill=0.25, context=0.0, pair=0.02)
"""What a budget that is to keep a target believes at first."""
TARGETS = st.one_of(st.none(), st.floats(1.0, 12.0))
"""From what decodes alone can hardly keep to what everything keeps."""
FORESIGHT = st.sampled_from(["none", "learned"])


class Histories(RuleBasedStateMachine):
    """Requests come, steps pass or fail, clients leave, deadlines pass; tiny pools, all policies.

    The oracle knows no schedule at all: it answers each request alone (`expected_reply`). At the end every
    request must have been answered exactly so, or have been ended by us for a reason we know. Prompts are
    made of few tokens, so that they share prefixes.
    """

    rig: Rig

    @initialize(
        budget=st.integers(1, 12),
        max_running=st.integers(1, 6),
        num_blocks=st.integers(1, 14),
        block_size=st.integers(1, 5),
        prefill_policy=POLICIES,
        policy=SCHEDULING_POLICIES,
        foresight=FORESIGHT,
        min_chunk=st.integers(1, 4),
        prefix_cache=st.booleans(),
        strict=st.booleans(),
        tpot_target=TARGETS,
    )
    def start(
        self,
        budget: int,
        max_running: int,
        num_blocks: int,
        block_size: int,
        prefill_policy: Chunked | FillBudget | WholePrompt,
        policy: SchedulingPolicy,
        foresight: str,
        min_chunk: int,
        prefix_cache: bool,
        strict: bool,
        tpot_target: float | None,
    ) -> None:
        self.rig = build_rig(
            timed=TargetBudget(budget, CostModel(prior=BELIEVED), target=tpot_target, min_chunk=min_chunk),
            seconds=TRUE.seconds,
            budget=budget,
            max_running=min(max_running, budget),
            num_blocks=num_blocks,
            block_size=block_size,
            prefill_policy=prefill_policy,
            policy=policy,
            output_lengths=NoForesight() if foresight == "none" else OutputLengthEstimator(),
            min_chunk=min_chunk,
            prefix_cache=prefix_cache,
            strict=strict,
        )
        self.requests: dict[RequestId, Request] = {}
        self.ended: dict[RequestId, FinishReason] = {}
        self.computed: dict[RequestId, int] = {}
        """Tokens computed for each request, those computed again included."""
        self.served: dict[RequestId, int] = {}
        """The last step in which each request that runs got tokens."""

    @rule(
        shared=st.integers(0, 20),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 9),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "tenant"]),
        patience=st.one_of(st.none(), st.integers(0, 40)),
        tpot_target=TARGETS,
    )
    def submit(
        self,
        shared: int,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        salt: str,
        patience: int | None,
        tpot_target: float | None,
    ) -> None:
        name = f"r{len(self.requests)}"
        pool = self.rig.scheduler.state.pool
        ids = [*range(shared), *prompt]
        fits = len(ids) + max_tokens <= pool.num_blocks * pool.block_size
        deadline = None if patience is None else self.rig.now + patience
        terms = {"priority": priority, "salt": salt, "deadline": deadline, "tpot_target": tpot_target}
        try:
            request = self.rig.add(name, ids, max_tokens, **terms)  # type: ignore[arg-type]
        except ContextLengthError:
            assert not fits
        else:
            assert fits
            self.requests[request.id] = request

    @precondition(lambda self: self.rig.scheduler.state.has_work)
    @rule(count=st.integers(1, 5))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.expire()
            if self.rig.scheduler.state.has_work:
                self.step()

    def step(self) -> None:
        decodes = {i for i, s in self.rig.scheduler.state.running.items() if s.num_remaining == 1}
        schedule = self.rig.step()
        assert decodes - set(schedule.preempted) == {run.request_id for run in schedule.decodes}
        for run in schedule.runs:
            self.computed[run.request_id] = self.computed.get(run.request_id, 0) + run.length
            self.served[run.request_id] = schedule.step
        longest = (
            OVERDUE_STEPS + self.rig.scheduler.state.config.max_running
        )  # all of them may be overdue at once
        for request_id in self.rig.scheduler.state.running:
            assert schedule.step - self.served.setdefault(request_id, schedule.step) <= longest, (
                "a running request starves"
            )

    def expire(self) -> None:
        for event in self.rig.scheduler.expire(self.rig.now):
            assert event.reason is FinishReason.TIMEOUT
            self.end(event)
        check_state(self.rig.scheduler.state)

    @precondition(lambda self: self.rig.scheduler.state.has_work)
    @rule()
    def failing_step(self) -> None:
        self.rig.begin()
        for event in self.rig.scheduler.fail("it broke"):
            self.end(event)
        check_state(self.rig.scheduler.state)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data: st.DataObject, in_flight: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        step = self.rig.begin() if in_flight and self.rig.scheduler.state.has_work else None
        for event in self.rig.scheduler.abort(name):
            self.end(event)
        check_state(self.rig.scheduler.state)
        if step is not None:
            self.rig.finish(step)

    def end(self, event: object) -> None:
        assert isinstance(event, FinishEvent)
        assert event.request_id not in self.ended
        self.ended[event.request_id] = event.reason

    @invariant()
    def law(self) -> None:
        if hasattr(self, "rig"):
            check_state(self.rig.scheduler.state)
            for sequence in (
                *self.rig.scheduler.state.running.values(),
                *self.rig.scheduler.state.waiting.values(),
            ):
                assert sequence.num_preemptions <= MAX_PREEMPTIONS
                assert not (self.rig.scheduler.state.config.strict and sequence.num_preemptions)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(1000):
            self.expire()
            if not self.rig.scheduler.state.has_work:
                break
            self.step()
        self.rig.assert_idle()
        for name, request in self.requests.items():
            expected = expected_reply(request.prompt, request.params.max_tokens)
            tokens = self.rig.tokens(name)
            if name in self.ended:
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
            assert self.computed.get(name, 0) <= (1 + MAX_PREEMPTIONS) * request.max_computed


Histories.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


def history(seed_steps: list[tuple[int, int]], order: SchedulingPolicy) -> list[object]:
    """Everything a fixed list of calls decides."""
    rig = build_rig(budget=6, num_blocks=9, block_size=3, max_running=4, policy=order)
    for i, (prompt, max_tokens) in enumerate(seed_steps):
        rig.add(f"r{i}", prompt, max_tokens)
        rig.step()
    rig.run()
    return [*rig.schedules, *rig.events]


def test_the_same_calls_give_the_same_schedules() -> None:
    calls = [(5, 3), (9, 7), (2, 9), (14, 2), (7, 7), (1, 1)]
    for order in (Fcfs(), Fair(), Shortest(0.5), Priority()):
        assert history(calls, order) == history(calls, order)
