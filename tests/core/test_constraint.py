"""A constraint decides which tokens may come: through preemptions, chunks and shared requests alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from rig import VOCAB, Rig, build_rig

from legato.core.events import FinishEvent, TokenEvent
from legato.core.lifecycle import FinishReason
from legato.core.prefill_policy import Chunked
from legato.core.request import RequestId
from legato.core.step_plan import SampleRow
from legato.engine.fake import next_allowed
from legato.errors import ConstraintError
from legato.sampling_params import SamplingParams

EOS = 99


def mask_of(*tokens: int) -> bytes:
    mask = bytearray(-(-VOCAB // 8))
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


@dataclass(frozen=True)
class Climbing:
    """Each token is above the one before; after `most` tokens, or 98, the end. Its own matcher: it keeps
    nothing."""

    most: int = 10
    breaks_at: int | None = None

    def matcher(self) -> "Climbing":
        return self

    def mask(self, generated: Sequence[int]) -> bytes:
        if len(generated) == self.breaks_at:
            raise ConstraintError("no way on")
        last = generated[-1] if generated else -1
        if len(generated) >= self.most or last >= EOS - 1:
            return mask_of(EOS)
        return mask_of(*range(last + 1, EOS + 1))


def run(rig: Rig) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while rig.scheduler.state.has_work:
        for event in rig.finish(rig.begin()):
            if isinstance(event, TokenEvent):
                tokens.setdefault(event.request_id, []).append(event.sampled.token)
    return tokens


def add_climbers(rig: Rig, num: int = 4) -> None:
    for i in range(num):
        rig.add(f"r{i}", 20 + i, 30, constraint=Climbing(12 + i), stop_token_ids=frozenset((EOS,)))


def test_every_token_is_allowed_and_the_end_ends_it() -> None:
    rig = build_rig()
    add_climbers(rig)
    for tokens in run(rig).values():
        assert tokens == sorted(set(tokens))
        assert tokens[-1] == EOS


def test_the_tokens_are_the_same_whatever_the_chunks_and_the_preemptions() -> None:
    plain = build_rig()
    add_climbers(plain)
    expected = run(plain)
    chunks = build_rig(prefill_policy=Chunked(3))
    add_climbers(chunks)
    assert run(chunks) == expected
    tight = build_rig(num_blocks=16)
    add_climbers(tight)
    assert run(tight) == expected
    assert any(schedule.preempted for schedule in tight.schedules)


def test_a_constraint_that_breaks_ends_its_request_alone() -> None:
    rig = build_rig()
    rig.add("good", 5, 8)
    rig.add("bad", 5, 8, constraint=Climbing(breaks_at=2), stop_token_ids=frozenset((EOS,)))
    tokens = run(rig)
    assert len(tokens["good"]) == 8
    assert len(tokens["bad"]) == 2
    assert [event for event in rig.events if isinstance(event, FinishEvent)] == [
        FinishEvent(RequestId("bad"), FinishReason.CONSTRAINT, "no way on")
    ]
    assert rig.scheduler.state.pool.num_used == 0


@pytest.mark.parametrize(("min_tokens", "most", "num_tokens"), [(0, 3, 4), (3, 3, 4), (20, 3, 4), (3, 0, 1)])
def test_a_reply_that_can_only_end_ends_before_min_tokens(
    min_tokens: int, most: int, num_tokens: int
) -> None:
    rig = build_rig()
    params = {"min_tokens": min_tokens, "constraint": Climbing(most), "stop_token_ids": frozenset((EOS,))}
    rig.add("r", (1, 1), 30, **params)
    tokens = run(rig)["r"]
    assert tokens[-1] == EOS
    assert len(tokens) <= num_tokens


def test_before_min_tokens_no_stop_token_is_allowed_that_need_not_be() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=frozenset((EOS, 10_000)))
    for num_generated, last in ((0, EOS - 1), (1, EOS - 1), (2, EOS)):
        generated = tuple(range(num_generated))
        row = SampleRow(0, RequestId("r"), params, num_generated, (), generated, Climbing())
        assert row.allowed() == mask_of(*range(num_generated, last + 1))
    assert SampleRow(0, RequestId("r"), params, 0).allowed() is None


def test_max_tokens_ends_a_reply_that_is_not_complete() -> None:
    rig = build_rig()
    rig.add("r", (1, 1), 2, constraint=Climbing(), stop_token_ids=frozenset((EOS,)))
    run(rig)
    assert [event.finish for event in rig.events if isinstance(event, TokenEvent)][-1] is FinishReason.LENGTH


@pytest.mark.parametrize(("token", "expected"), [(0, 3), (3, 3), (4, 50), (50, 50), (51, 3), (99, 3)])
def test_the_fake_takes_the_next_allowed_token_around_the_end(token: int, expected: int) -> None:
    assert next_allowed(token, mask_of(3, 50)) == expected
