"""Long random histories against the law and against a slow, obvious oracle."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rig import VOCAB, Rig, build_rig, expected_reply

from legato.core.events import FinishEvent
from legato.core.prefill import Chunked, FillBudget, WholePrompt
from legato.core.request import Request, RequestId
from legato.core.stopping import FinishReason
from legato.errors import ContextLengthError

POLICIES = st.one_of(st.integers(1, 9).map(Chunked), st.just(FillBudget()), st.just(WholePrompt()))


class Histories(RuleBasedStateMachine):
    """Requests come, steps pass or fail, clients leave; tiny pools, all policies.

    The oracle knows no schedule at all: it answers each request alone (`expected_reply`). At the end every
    request must have been answered exactly so, or have been ended by us for a reason we know.
    """

    rig: Rig

    @initialize(
        budget=st.integers(1, 12),
        max_running=st.integers(1, 6),
        num_blocks=st.integers(1, 14),
        block_size=st.integers(1, 5),
        policy=POLICIES,
    )
    def start(
        self,
        budget: int,
        max_running: int,
        num_blocks: int,
        block_size: int,
        policy: Chunked | FillBudget | WholePrompt,
    ) -> None:
        self.rig = build_rig(
            budget=budget,
            max_running=min(max_running, budget),
            num_blocks=num_blocks,
            block_size=block_size,
            policy=policy,
        )
        self.requests: dict[RequestId, Request] = {}
        self.ended: dict[RequestId, FinishReason] = {}

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 9),
    )
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        name = f"r{len(self.requests)}"
        pool = self.rig.scheduler.blocks
        fits = len(prompt) + max_tokens <= pool.num_blocks * pool.block_size
        try:
            request = self.rig.add(name, prompt, max_tokens)
        except ContextLengthError:
            assert not fits
        else:
            assert fits
            self.requests[request.id] = request

    @precondition(lambda self: self.rig.scheduler.has_work)
    @rule()
    def step(self) -> None:
        decodes = {i for i, s in self.rig.scheduler.running.items() if s.remaining == 1}
        schedule = self.rig.step()
        assert decodes - set(schedule.preempted) == {run.request_id for run in schedule.decodes}

    @precondition(lambda self: self.rig.scheduler.has_work)
    @rule()
    def failing_step(self) -> None:
        self.rig.begin()
        for event in self.rig.scheduler.fail("it broke"):
            self.end(event)
        self.rig.scheduler.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data: st.DataObject, in_flight: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        step = self.rig.begin() if in_flight and self.rig.scheduler.has_work else None
        for event in self.rig.scheduler.abort(name):
            self.end(event)
        self.rig.scheduler.check()
        if step is not None:
            self.rig.finish(step)

    def end(self, event: object) -> None:
        assert isinstance(event, FinishEvent)
        assert event.request_id not in self.ended
        self.ended[event.request_id] = event.reason

    @invariant()
    def law(self) -> None:
        if hasattr(self, "rig"):
            self.rig.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        self.rig.assert_idle()
        for name, request in self.requests.items():
            expected = expected_reply(request.prompt, request.params.max_tokens)
            tokens = self.rig.tokens(name)
            if name in self.ended:
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


def history(seed_steps: list[tuple[int, int]]) -> list[object]:
    """Everything a fixed list of calls decides."""
    rig = build_rig(budget=6, num_blocks=9, block_size=3, max_running=4)
    for i, (prompt, max_tokens) in enumerate(seed_steps):
        rig.add(f"r{i}", prompt, max_tokens)
        rig.step()
    rig.run()
    return [*rig.schedules, *rig.events]


def test_the_same_calls_give_the_same_schedules() -> None:
    calls = [(5, 3), (9, 7), (2, 9), (14, 2), (7, 7), (1, 1)]
    assert history(calls) == history(calls)
