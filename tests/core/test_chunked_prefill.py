"""The founding contract of chunked prefill, test by test and by name.

The seventh, `chunked_prefill_matches_whole_within_tolerance`, needs a model: tests/runner.
"""

from hypothesis import given
from hypothesis import strategies as st
from rig import build_rig, expected_reply

from legato.core.prefill_policy import Chunked, FillBudget, PrefillPolicy, WholePrompt, split
from legato.core.schedule import Chunk, Schedule


def runs(schedule: Schedule) -> tuple[list[str], list[tuple[str, int, int, bool]]]:
    """A schedule as (decodes, chunks), each chunk (request, start, end, last)."""
    return (
        [run.request_id for run in schedule.decodes],
        [(run.request_id, run.start, run.end, run.is_last) for run in schedule.chunks],
    )


def test_hand_example_chunk_plan() -> None:
    """Budget 8, chunk 4, blocks of 4; A: 2 tokens, 3 to make; B: 10 tokens, 1 to make."""
    rig = build_rig(budget=8, prefill_policy=Chunked(4))
    a, b = rig.add("A", 2, max_tokens=3), rig.add("B", 10, max_tokens=1)

    assert runs(rig.step()) == ([], [("A", 0, 2, True), ("B", 0, 4, False)])
    assert runs(rig.step()) == (["A"], [("B", 4, 8, False)])
    assert runs(rig.step()) == (["A"], [("B", 8, 10, True)])

    assert [schedule.num_tokens for schedule in rig.schedules] == [6, 5, 3]
    assert [event.request_id for event in rig.events] == ["A", "A", "A", "B"]
    assert rig.tokens("A") == expected_reply(a.prompt, 3)
    assert rig.tokens("B") == expected_reply(b.prompt, 1)
    rig.assert_idle()


def test_whole_prompt_waits_for_a_step_of_its_own() -> None:
    """The same load without chunks: B waits for A to finish, then runs alone in a step of 10 tokens."""
    rig = build_rig(budget=8, prefill_policy=WholePrompt())
    rig.add("A", 2, max_tokens=3)
    b = rig.add("B", 10, max_tokens=1)

    assert runs(rig.step()) == ([], [("A", 0, 2, True)])
    assert runs(rig.step()) == (["A"], [])
    assert runs(rig.step()) == (["A"], [])
    assert runs(rig.step()) == ([], [("B", 0, 10, True)])
    assert rig.tokens("B") == expected_reply(b.prompt, 1)
    rig.assert_idle()


def test_split_hand_example() -> None:
    assert split(10, 4) == [(0, 4), (4, 4), (8, 2)]
    assert split(8, 4) == [(0, 4), (4, 4)]
    assert split(3, 4) == [(0, 3)]
    assert split(3, 0) == split(3, 1) == [(0, 1), (1, 1), (2, 1)]
    assert split(0, 4) == []


@given(n=st.integers(0, 300), chunk=st.integers(0, 40))
def test_split_covers_every_token_once_and_in_order(n: int, chunk: int) -> None:
    positions = [p for start, length in split(n, chunk) for p in range(start, start + length)]
    assert positions == list(range(n))
    assert len(split(n, chunk)) == -(-n // max(chunk, 1))


def test_a_prompt_alone_is_split_as_split_says() -> None:
    rig = build_rig(budget=8, prefill_policy=Chunked(3))
    rig.add("A", 11, max_tokens=1)
    rig.run()
    assert [(s.runs[0].start, s.runs[0].length) for s in rig.schedules] == split(11, 3)


def test_plan_samples_only_sequence_ends() -> None:
    """A decode is the newest token at position n - 1; a chunk its tokens at start; only ends are sampled."""
    rig = build_rig(budget=8, prefill_policy=Chunked(4))
    rig.add("A", (5, 7), max_tokens=3)
    rig.add("B", range(10, 20), max_tokens=2)
    rig.step()

    step = rig.begin()
    decode, chunk = step.batch.seqs
    assert (decode.request_id, decode.tokens, decode.start) == ("A", (13,), 2)
    assert (chunk.request_id, chunk.tokens, chunk.start) == ("B", (14, 15, 16, 17), 4)
    assert [(row.seq, row.request_id, row.num_generated) for row in step.sample] == [(0, "A", 1)]
    assert decode.end <= len(decode.block_table) * 4
    assert chunk.end <= len(chunk.block_table) * 4
    rig.finish(step)

    step = rig.begin()
    assert [(row.seq, row.request_id) for row in step.sample] == [(0, "A"), (1, "B")]
    assert step.batch.seqs[1].tokens == (18, 19)
    rig.finish(step)


@given(
    prompts=st.lists(st.integers(1, 32), min_size=1, max_size=8),
    max_tokens=st.integers(1, 6),
    chunk=st.integers(1, 12),
    budget=st.integers(4, 8),
)
def test_token_budget_never_exceeded(prompts: list[int], max_tokens: int, chunk: int, budget: int) -> None:
    """Prompts of up to 4 times the budget: every step within it, every output exact."""
    for policy in (Chunked(chunk), FillBudget()):
        rig = build_rig(budget=budget, prefill_policy=policy)
        requests = [rig.add(f"r{i}", n, max_tokens) for i, n in enumerate(prompts)]
        rig.run()
        assert max(schedule.num_tokens for schedule in rig.schedules) <= budget
        for request in requests:
            assert rig.tokens(request.id) == expected_reply(request.prompt, max_tokens)
        rig.assert_idle()


@given(
    remaining=st.integers(1, 100),
    budget=st.integers(0, 50),
    alone=st.booleans(),
    policy=st.one_of(st.integers(1, 20).map(Chunked), st.just(FillBudget())),
)
def test_a_chunking_policy_by_itself_keeps_the_budget(
    remaining: int, budget: int, alone: bool, policy: PrefillPolicy
) -> None:
    length = policy.chunk_len(remaining, budget, alone)
    assert length <= min(remaining, budget)
    if isinstance(policy, Chunked):
        assert length == min(remaining, policy.chunk, budget)
    else:
        assert length == min(remaining, budget)


@given(max_tokens=st.integers(40, 60), chunk=st.integers(10, 16))
def test_long_prompt_progresses_beside_decodes(max_tokens: int, chunk: int) -> None:
    """A 40-token prompt beside 3 decodes starts to answer within 4 steps; without chunks it waits for all."""

    def steps_to_first_token(policy: PrefillPolicy) -> int:
        rig = build_rig(budget=16, prefill_policy=policy)
        for i in range(3):
            rig.add(f"d{i}", 2, max_tokens)
        rig.step()
        rig.add("long", 40, max_tokens=1)
        while not rig.tokens("long"):
            decoding = set(rig.scheduler.state.running) - {"long"}
            schedule = rig.step()
            assert decoding <= {run.request_id for run in schedule.decodes}
        return len(rig.schedules) - 1

    assert steps_to_first_token(Chunked(chunk)) <= 4
    assert steps_to_first_token(WholePrompt()) >= max_tokens - 2


def test_a_chunk_knows_its_end() -> None:
    assert Chunk("A", 4, 3, False).end == 7  # type: ignore[arg-type]
