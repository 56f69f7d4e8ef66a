"""The scheduler's law, one behaviour at a time."""

from typing import Any

import pytest
from rig import VOCAB, Rig, build_rig, expected_reply

from legato.core.block_pool import BlockPool
from legato.core.events import FinishEvent, TokenEvent
from legato.core.invariants import check_state
from legato.core.lifecycle import FinishReason, Status
from legato.core.prefill_policy import Chunked, FillBudget, WholePrompt
from legato.core.request import RequestId
from legato.core.schedule import Chunk, Reason
from legato.core.scheduler import Scheduler
from legato.core.state import SchedulerConfig
from legato.errors import ConfigError, ContextLengthError, RequestError


def ids(*names: str) -> tuple[RequestId, ...]:
    return tuple(RequestId(name) for name in names)


# -- what enters ------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    """D-01, B-11: refused at submit, not left to block the queue."""
    rig = build_rig(num_blocks=4, block_size=4)
    with pytest.raises(ContextLengthError, match=r"16 tokens and asks for 1 more.*at most 16"):
        rig.add("long", 16, max_tokens=1)
    assert not rig.scheduler.state.has_work
    rig.add("fits", 15, max_tokens=1)
    rig.run()
    rig.assert_idle()


def test_a_pool_smaller_than_the_context_refuses_by_its_own_number() -> None:
    """D-02: a pool below the advertised context can neither deadlock nor accept what it cannot finish."""
    config = SchedulerConfig(max_batch_tokens=8, max_running=2, max_model_len=1000, vocab_size=VOCAB)
    rig = Rig(Scheduler(config, BlockPool(3, 4)), build_rig(num_blocks=3).runner)
    with pytest.raises(ContextLengthError, match=r"need 4 blocks of 4 tokens; the KV cache has 3"):
        rig.add("A", 10, max_tokens=4)
    rig.add("B", 10, max_tokens=3)
    rig.run()
    rig.assert_idle()


def test_the_largest_accepted_request_fills_the_pool_and_finishes() -> None:
    rig = build_rig(num_blocks=4, block_size=4)
    request = rig.add("A", 3, max_tokens=13)
    rig.run()
    assert rig.tokens("A") == expected_reply(request.prompt, 13)
    assert max(s.runs[0].end for s in rig.schedules) == 15


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), {}, "has no tokens"),
        ((1, 100), {}, "prompt: token ids must be from 0 to 99"),
        ((-1,), {}, "prompt: token ids must be from 0 to 99"),
        ((1,), {"stop_token_ids": frozenset({100})}, "stop_token_ids: token ids must be from 0 to 99"),
        ((1,), {"logit_bias": ((100, 1.0),)}, "logit_bias: token ids must be from 0 to 99"),
        ((1,), {"logit_bias": ((1, float("nan")),)}, "finite"),
        ((1,), {"temperature": float("nan")}, "temperature must be at least 0, not nan"),
        ((1,), {"temperature": float("inf")}, "temperature must be at least 0, not inf"),
        ((1,), {"top_k": -1}, "top_k must be at least 0, not -1"),
        ((1,), {"top_p": 1.1}, "top_p must be at most 1"),
        ((1,), {"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ((1,), {"presence_penalty": float("inf")}, "finite"),
        ((1,), {"max_tokens": 0}, "at least 1, not 0"),
        ((1,), {"max_tokens": -3}, "at least 0, not -3"),
        ((1,), {"max_tokens": 2.5}, "max_tokens must be an integer, not 2.5"),
        ((1,), {"max_tokens": "10"}, "max_tokens must be an integer, not '10'"),
        ((1,), {"max_tokens": True}, "max_tokens must be an integer, not True"),
        ((1,), {"max_tokens": None}, "max_tokens must be an integer, not None"),
        ((1,), {"max_tokens": 10**12}, "asks for 1000000000000 more"),
        ((1,), {"min_tokens": 0.5}, "min_tokens must be an integer"),
        ((1,), {"top_k": 1.5}, "top_k must be an integer"),
        ((1,), {"seed": "7"}, "seed must be an integer"),
        ((1,), {"seed": True}, "seed must be an integer"),
        ((1,), {"logprobs": 1.5}, "logprobs must be an integer"),
        ((1,), {"prompt_logprobs": "1"}, "prompt_logprobs must be an integer"),
        ((1,), {"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ((1,), {"top_p": None}, "top_p must be a number"),
        ((1,), {"presence_penalty": False}, "presence_penalty must be a number"),
    ],
)
def test_an_impossible_request_is_refused(
    prompt: tuple[int, ...], params: dict[str, Any], message: str
) -> None:
    """B-06, B-23 for who uses the engine without HTTP: nothing of it shows only in a step."""
    rig = build_rig()
    with pytest.raises(RequestError, match=message):
        rig.add("A", prompt, **params)
    assert not rig.scheduler.state.has_work


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    """C-10."""
    rig = build_rig()
    rig.add("A", 3, max_tokens=1)
    with pytest.raises(RequestError, match="in use"):
        rig.add("A", 3)
    rig.run()
    rig.add("A", 3, max_tokens=1)
    rig.run()
    assert len(rig.tokens("A")) == 2


@pytest.mark.parametrize("name", ["max_batch_tokens", "max_running", "max_model_len", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_zero_and_negative_limits_are_refused(name: str, value: int) -> None:
    """D-15: never accepted and then a silent hang."""
    limits = {"max_batch_tokens": 8, "max_running": 4, "max_model_len": 64, "vocab_size": 9} | {name: value}
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not {value}"):
        SchedulerConfig(**limits)


def test_more_running_sequences_than_budget_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_running \(9\) is above max_batch_tokens \(8\)"):
        SchedulerConfig(max_batch_tokens=8, max_running=9, max_model_len=64, vocab_size=VOCAB)


def test_a_pool_and_a_chunk_need_a_size() -> None:
    with pytest.raises(ConfigError, match="at least 1 block"):
        BlockPool(0, 4)
    with pytest.raises(ConfigError, match="at least 1 token"):
        Chunked(0)


# -- order ------------------------------------------------------------------------------------------------


def test_decodes_come_before_an_older_prefill() -> None:
    """D-10: a prompt that is older than a decode still cannot delay it."""
    rig = build_rig(budget=4, prefill_policy=Chunked(2))
    rig.add("old", 20, max_tokens=1)
    rig.add("new", 1, max_tokens=5)
    rig.step()
    for _ in range(4):
        schedule = rig.step()
        assert [run.request_id for run in schedule.decodes] == ["new"]
        assert [run.request_id for run in schedule.chunks] == ["old"]


def test_a_short_prompt_starts_beside_a_giant_one() -> None:
    """D-09: several prompts may be in prefill at once when the chunk leaves room."""
    rig = build_rig(budget=8, prefill_policy=Chunked(5))
    rig.add("giant", 60, max_tokens=1)
    rig.add("short", 3, max_tokens=1)
    rig.step()
    assert rig.tokens("short")
    assert not rig.tokens("giant")


def test_the_budget_is_filled_by_default() -> None:
    rig = build_rig(budget=8)
    rig.add("A", 20, max_tokens=2)
    rig.add("B", 20, max_tokens=2)
    rig.run()
    assert [s.num_tokens for s in rig.schedules[:5]] == [8] * 5
    assert isinstance(rig.scheduler.state.prefill_policy, FillBudget)


def test_a_started_prompt_comes_before_a_waiting_one() -> None:
    rig = build_rig(budget=4)
    rig.add("A", 9, max_tokens=1)
    rig.add("B", 2, max_tokens=1)
    order = [[run.request_id for run in rig.step().chunks] for _ in range(2)]
    assert order == [["A"], ["A"]]


def test_at_most_max_running_sequences_run() -> None:
    rig = build_rig(budget=8, max_running=2)
    for i in range(5):
        rig.add(f"r{i}", 1, max_tokens=3)
    schedule = rig.step()
    assert schedule.admitted == ids("r0", "r1")
    assert schedule.reasons == {RequestId("r2"): Reason.MAX_RUNNING}
    assert schedule.queue_reason is Reason.MAX_RUNNING
    rig.run()
    rig.assert_idle()


def test_every_prompt_of_a_full_batch_progresses() -> None:
    """D-07: nothing latches; a freed place is taken in the very next step."""
    rig = build_rig(budget=4, max_running=4)
    for i in range(8):
        rig.add(f"r{i}", 1, max_tokens=1)
    assert rig.step().num_tokens == 4
    assert rig.step().num_tokens == 4
    rig.assert_idle()


@pytest.mark.parametrize(("block_size", "chunk"), [(4, 3), (16, 1), (64, 17), (64, 63), (64, 65), (64, 100)])
def test_a_small_chunk_of_any_size_is_never_rounded_up(block_size: int, chunk: int) -> None:
    """E-15: the chunk may be smaller than a block, or no multiple of it."""
    rig = build_rig(budget=128, block_size=block_size, prefill_policy=Chunked(chunk))
    request = rig.add("A", 3 * chunk + 1, max_tokens=1)
    rig.run()
    assert [s.num_tokens for s in rig.schedules] == [chunk] * 3 + [1]
    assert rig.tokens("A") == expected_reply(request.prompt, 1)


class Greedy:
    """A policy without manners: takes everything, or nothing, or less than nothing."""

    whole = False

    def __init__(self, length: int) -> None:
        self.length = length

    def chunk_len(self, remaining: int, budget: int, alone: bool) -> int:  # noqa: ARG002
        return self.length


@pytest.mark.parametrize("length", [10**9, 9, 0, -5])
def test_no_policy_can_break_the_budget_or_stop_the_engine(length: int) -> None:
    rig = build_rig(budget=8, prefill_policy=Greedy(length))
    requests = [rig.add(f"r{i}", 21, max_tokens=3) for i in range(3)]
    rig.run()
    assert max(s.num_tokens for s in rig.schedules) <= 8
    for request in requests:
        assert rig.tokens(request.id) == expected_reply(request.prompt, 3)


def test_the_whole_prompt_exception_holds_for_one_prompt_alone() -> None:
    rig = build_rig(budget=8, prefill_policy=WholePrompt())
    rig.add("A", 20, max_tokens=1)
    rig.add("B", 20, max_tokens=1)
    rig.add("C", 3, max_tokens=1)
    assert [len(rig.step().runs) for _ in range(3)] == [1, 1, 1]
    assert [s.num_tokens for s in rig.schedules] == [20, 20, 3]


# -- blocks -----------------------------------------------------------------------------------------------


def test_admission_needs_the_whole_prompt_and_a_block_more() -> None:
    rig = build_rig(budget=8, num_blocks=5, block_size=4)
    rig.add("A", 9, max_tokens=4)
    rig.add("B", 8, max_tokens=8)
    schedule = rig.step()
    assert schedule.admitted == ids("A")
    rig.step()
    assert dict(rig.schedules[-1].left_out)[RequestId("B")] is Reason.BLOCKS
    assert rig.scheduler.state.pool.num_free == 2, "room for B's prompt, and none to go on with"


def test_a_reply_that_needs_no_further_block_is_admitted_into_the_exact_rest() -> None:
    rig = build_rig(budget=8, num_blocks=4, block_size=4)
    rig.add("A", 6, max_tokens=3)
    rig.add("B", 7, max_tokens=2)
    rig.step()
    rig.step()
    assert {run.request_id for run in rig.schedules[-1].runs} == {"A", "B"}


def test_the_youngest_is_preempted_and_goes_on_where_it_was() -> None:
    rig = build_rig(budget=8, num_blocks=5, block_size=2, max_running=2)
    a = rig.add("A", 3, max_tokens=6)
    b = rig.add("B", 3, max_tokens=6)
    rig.run()
    preempting = [s for s in rig.schedules if s.preempted]
    assert preempting
    assert {name for s in preempting for name in s.preempted} == {"B"}
    assert all(not s.admitted for s in preempting)
    for request in (a, b):
        assert rig.tokens(request.id) == expected_reply(request.prompt, 6)
    rig.assert_idle()


def test_a_preempted_sequence_waits_at_the_head_of_the_queue() -> None:
    """D-19, E-14: ahead of everyone who never ran, with all its tokens to compute but those still cached."""
    rig = build_rig(budget=8, num_blocks=5, block_size=2, max_running=2)
    rig.add("A", 3, max_tokens=6)
    rig.add("B", 3, max_tokens=6)
    rig.add("C", 1, max_tokens=1)
    while not rig.step().preempted:
        pass
    b = rig.scheduler.state.sequence(RequestId("B"))
    assert list(rig.scheduler.state.waiting) == ["B", "C"]
    assert b.status is Status.PREEMPTED
    assert (b.num_computed, b.block_table, b.num_preemptions) == (0, [], 1)
    assert b.num_generated >= 1
    known = b.num_known
    while b.status is Status.PREEMPTED:
        rig.step()
    chunk = rig.schedules[-1].chunks[0]
    assert chunk == Chunk(RequestId("B"), 2, known - 2, True), "only its first block was left in the cache"
    rig.run()
    rig.assert_idle()


def test_a_pool_too_small_for_two_finishes_all_one_after_another() -> None:
    """D-14, D-05: no livelock, and no output changes."""
    rig = build_rig(budget=8, num_blocks=6, block_size=2, max_running=4)
    requests = [rig.add(f"r{i}", 4 + i % 3, max_tokens=6) for i in range(12)]
    rig.run(max_steps=500)
    for request in requests:
        assert rig.tokens(request.id) == expected_reply(request.prompt, 6)
    assert any(s.preempted for s in rig.schedules)
    rig.assert_idle()


# -- ends -------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_reply_and_wins_over_the_length() -> None:
    rig = build_rig()
    rig.add("A", (5, 7), max_tokens=2, stop_token_ids=frozenset({27}))
    rig.run()
    last = rig.events[-1]
    assert isinstance(last, TokenEvent)
    assert (last.sampled.token, last.finish) == (27, FinishReason.STOP)


def test_no_stop_token_counts_before_min_tokens() -> None:
    rig = build_rig()
    rig.add("A", (5, 7), max_tokens=5, min_tokens=2, stop_token_ids=frozenset({13, 27, 55}))
    rig.run()
    assert rig.tokens("A") == [13, 27, 55]


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_exactly_max_tokens_are_made(max_tokens: int) -> None:
    """A-19, B-06."""
    rig = build_rig()
    rig.add("A", 3, max_tokens=max_tokens)
    rig.run()
    assert len(rig.tokens("A")) == max_tokens
    assert rig.events[-1].finish is FinishReason.LENGTH  # type: ignore[union-attr]


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_in_any_state_gives_every_block_back(steps: int, in_flight: bool) -> None:
    """C-02, C-05, C-07: waiting, mid-prefill, decoding or preempted; between steps or during one."""
    rig = build_rig(budget=4, num_blocks=6, block_size=2, max_running=3)
    for i in range(4):
        rig.add(f"r{i}", 4, max_tokens=5)
    for _ in range(steps):
        rig.step()
    for i in range(4):
        name = RequestId(f"r{i}")
        living = rig.scheduler.state.has_work
        step = rig.begin() if in_flight and living else None
        known = name in rig.scheduler.state.running or name in rig.scheduler.state.waiting
        events = rig.scheduler.abort(name)
        check_state(rig.scheduler.state)
        assert events == ((FinishEvent(name, FinishReason.ABORT),) if known else ())
        assert rig.scheduler.abort(name) == ()
        if step is not None:
            assert name not in {event.request_id for event in rig.finish(step)}
    rig.assert_idle()


def test_blocks_of_an_aborted_sequence_stay_held_while_a_step_writes_them() -> None:
    rig = build_rig(num_blocks=4, block_size=4)
    rig.add("A", 6, max_tokens=2)
    step = rig.begin()
    rig.scheduler.abort(RequestId("A"))
    assert rig.scheduler.state.held_back
    assert rig.scheduler.state.pool.num_free == 2
    rig.finish(step)
    rig.assert_idle()


def test_a_failed_step_ends_its_sequences_and_no_others() -> None:
    rig = build_rig(budget=4, max_running=2)
    rig.add("A", 3, max_tokens=5)
    rig.add("B", 3, max_tokens=5)
    other = rig.add("C", 3, max_tokens=2)
    rig.step()
    rig.begin()
    events = rig.scheduler.fail("it broke")
    check_state(rig.scheduler.state)
    assert events == tuple(FinishEvent(name, FinishReason.ERROR, "it broke") for name in ids("A", "B"))
    rig.run()
    assert rig.tokens("C") == expected_reply(other.prompt, 2)
    rig.assert_idle()


# -- misuse is our own bug and says so --------------------------------------------------------------------


def test_a_schedule_is_committed_once_and_in_its_turn() -> None:
    rig = build_rig()
    rig.add("A", 3)
    schedule = rig.decide()
    rig.scheduler.commit(schedule)
    with pytest.raises(RuntimeError, match="not the next step"):
        rig.scheduler.commit(schedule)
    rig.scheduler.fail("over")
    with pytest.raises(RuntimeError, match="not the next step"):
        rig.scheduler.commit(schedule)
    with pytest.raises(RuntimeError, match="no step is in flight"):
        rig.scheduler.fail("again")


def test_prompts_do_not_show_in_reprs() -> None:
    rig = build_rig()
    request = rig.add("A", (77, 78), max_tokens=2)
    step = rig.begin()
    shown = repr(request) + repr(step) + repr(rig.scheduler.state.sequence(request.id))
    assert "77" not in shown
    assert "78" not in shown
