"""Random traffic of every kind through the whole engine: threads, targets, timeouts, clients that leave.

Whatever comes together, all get the beginning of the replies that they would have got alone, and exactly one
end each; and when all are gone nothing of them is left, in any room.
"""

import asyncio
import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from legato.core.block_pool import BlockPool
from legato.core.budget import TargetBudget
from legato.core.invariants import check_state
from legato.core.lifecycle import FinishReason
from legato.core.prefill_policy import Chunked, FillBudget, PrefillPolicy, WholePrompt
from legato.core.scheduler import Scheduler
from legato.core.scheduling_policy import SCHEDULING_POLICIES
from legato.core.state import SchedulerConfig
from legato.core.step_plan import StepPlan
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepCost
from legato.engine.async_engine import AsyncEngine
from legato.engine.engine import Engine
from legato.engine.fake import FakeRunner, next_token
from legato.engine.output_processor import Delta, DetokenizeOptions
from legato.engine.requests import RequestOptions
from legato.metrics.prometheus import Metrics
from legato.metrics.timeline import Targets
from legato.sampling_params import SamplingParams
from legato.text.fake import FakeTokenizer

VOCAB, BLOCK = 250, 4
TRUE = StepCost(step=12e-3, head=6e-3, decode=1.5e-3, prefill=6e-4, context=3e-6, pair=4e-6)
NUM_CLIENTS = 60


class Machine:
    """A runner whose steps take their time on a clock of its own, and fail now and then."""

    def __init__(self, num_blocks: int, draw: random.Random) -> None:
        self.now = 0.0
        self._draw = draw
        self.runner = FakeRunner(
            num_blocks=num_blocks,
            block_size=BLOCK,
            vocab_size=VOCAB,
            step_seconds=self._seconds,
            sleep=self._sleep,
        )

    def clock(self) -> float:
        return self.now

    def _seconds(self, plan: StepPlan) -> float:
        if self._draw.random() < 0.01:
            raise RuntimeError("a step that fails")
        return TRUE.seconds(plan.shape) * self._draw.lognormvariate(0, 0.1)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def pick(draw: random.Random, *choices: float | None) -> float | None:
    return draw.choice(choices)


async def client(served: AsyncEngine, draw: random.Random, number: int) -> FinishReason | None:
    """One request: how it ended, None if its client left before that."""
    for _ in range(draw.randrange(40)):
        await asyncio.sleep(0)
    scores = draw.random() < 0.1
    prompt = [
        *range(draw.choice([0, 0, 9, 30])),
        *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 60))),
    ]
    params = SamplingParams(
        max_tokens=draw.randint(0 if scores else 1, 30), prompt_logprobs=0 if scores else None
    )
    terms = RequestOptions(
        priority=draw.randint(-1, 1),
        cache_salt=draw.choice(["", "tenant"]),
        tpot_target=pick(draw, None, None, 1e-6, 0.02, 0.05, 1e9),
        ttft_target=pick(draw, None, 1e-6, 1.0),
        timeout=pick(draw, None, None, None, 0.0, 0.2, 2.0),
        wants_progress=draw.random() < 0.3,
    )
    rules = DetokenizeOptions(stop=(chr(draw.randrange(VOCAB)),) if draw.random() < 0.2 else ())
    stay = draw.choice([0, 3, 1_000, 1_000, 1_000])
    deltas: list[Delta] = []
    with served.submit(prompt, params, options=terms, text=rules, request_id=f"r{number}") as stream:
        while len(deltas) < stay and (delta := await anext(stream, None)) is not None:
            deltas.append(delta)
            await asyncio.sleep(0)
    known = list(prompt)
    for delta in deltas:
        if delta.sampled is not None:
            assert delta.sampled.token == next_token(known, VOCAB)
            known.append(delta.sampled.token)
    ends = [delta.finish for delta in deltas if delta.finish is not None]
    assert len(ends) <= 1
    assert ends == [deltas[-1].finish] if ends else len(deltas) == stay
    if ends and ends[0].reason is FinishReason.LENGTH:
        assert len(known) - len(prompt) == params.max_tokens
        scored = [token.token for delta in deltas for token in delta.prompt]
        assert scored == (prompt if scores else [])
    return ends[0].reason if ends else None


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    budget=st.integers(1, 64),
    max_running=st.integers(1, 12),
    num_blocks=st.integers(40, 120),
    policy=st.sampled_from([FillBudget(), Chunked(7), WholePrompt()]),
    order=st.sampled_from(sorted(SCHEDULING_POLICIES)),
    target=st.sampled_from([None, 1e-6, 0.025, 0.05, 0.2]),
    min_chunk=st.integers(1, 16),
    strict=st.booleans(),
)
def test_everybody_is_answered_and_nothing_is_left(
    seed: int,
    budget: int,
    max_running: int,
    num_blocks: int,
    policy: PrefillPolicy,
    order: str,
    target: float | None,
    min_chunk: int,
    strict: bool,
) -> None:
    draw = random.Random(seed)
    machine = Machine(num_blocks, draw)
    config = SchedulerConfig(
        max_batch_tokens=budget,
        max_running=min(max_running, budget),
        max_model_len=num_blocks * BLOCK,
        vocab_size=VOCAB,
        min_chunk=min_chunk,
        strict=strict,
    )
    scheduler = Scheduler(
        config,
        BlockPool(num_blocks, BLOCK),
        prefill_policy=policy,
        budget=TargetBudget(budget, CostModel(), target=target, min_chunk=min_chunk),
        policy=SCHEDULING_POLICIES[order](budget),
    )
    engine = Engine.on_runner(scheduler, machine.runner, clock=machine.clock)
    metrics = Metrics(
        model_name="fake", budget=budget, blocks=scheduler.state.pool, targets=Targets(tpot=target)
    )
    engine.observe(metrics)

    async def scenario() -> list[FinishReason | None]:
        served = AsyncEngine(engine, FakeTokenizer())
        await served.start()
        clients = [client(served, random.Random(f"{seed} {i}"), i) for i in range(NUM_CLIENTS)]
        ends = await asyncio.gather(*clients)
        await served.drain()
        await served.stop()
        await asyncio.sleep(0)  # the last events come
        assert served.failure == "the engine is shut down"
        assert not served._streams
        assert not served._aborting
        assert served.queue._num_tokens == 0
        return ends

    ends = asyncio.run(asyncio.wait_for(scenario(), 60))
    check_state(scheduler.state)
    assert not scheduler.state.has_work
    assert scheduler.state.pool.num_free == num_blocks
    assert not engine._progress._last
    page = metrics.render().decode()
    counted = {
        reason: float(num)
        for reason, num in re.findall(r'vllm:request_success_total\{.*finished_reason="(\w+)".*\} (.*)', page)
    }
    assert sum(counted.values()) == NUM_CLIENTS
    for reason in (FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.LENGTH):
        assert counted[reason.value] >= ends.count(reason)
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "legato_blocks_used"):
        assert re.search(rf"^{gauge}\{{.*\}} 0.0$", page, re.MULTILINE), gauge
