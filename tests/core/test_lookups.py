"""How much of long chains a step looks at, counted: a queue of requests on one document must not cost a
look-up for each block and request."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from rig import build_rig

from legato.core.block_pool import BlockPool
from legato.core.prefill_policy import Chunked
from legato.core.prefix_index import Digest
from legato.core.schedule import Reason
from legato.core.scheduling_policy import Fair

BLOCKS = 400
DOCUMENT = [i % 90 for i in range(4 * BLOCKS)]


@dataclass
class Count:
    digests: int = 0


def counted(pool: BlockPool) -> Count:
    """Count the digests that a pool is asked for."""
    count, find = Count(), pool.find

    def asked(digests: Iterable[Digest]) -> Iterable[Digest]:
        for digest in digests:
            count.digests += 1
            yield digest

    pool.find = lambda digests: find(asked(digests))  # type: ignore[method-assign]
    return count


@pytest.mark.parametrize("num_question", [2, 40])
def test_a_queue_on_one_cached_document_looks_it_up_for_few(num_question: int) -> None:
    """Questions too long for the share of 8 tokens, and short ones when it is used up: whole chains are
    looked up only of those that come in and those that are refused."""
    rig = build_rig(budget=16, num_blocks=3 * BLOCKS, max_running=16, policy=Fair(), min_chunk=4)
    rig.add("first", DOCUMENT, max_tokens=1)
    rig.run()
    for i in range(64):
        rig.add(f"q{i}", [*DOCUMENT, 90 + i % 9, *range(num_question)], max_tokens=20)
    count = counted(rig.scheduler.state.pool)
    schedule = rig.scheduler.schedule(0.0)
    assert schedule.admitted
    num_asked = len(schedule.admitted) + len(schedule.left_out)
    assert count.digests <= 2 * num_asked * BLOCKS + 64 * 2


def test_followers_of_a_long_document_are_told_apart_by_few_comparisons() -> None:
    """The leader computes 200 tokens a step; all others wait for it, or for their turn."""
    rig = build_rig(
        budget=800,
        num_blocks=3 * BLOCKS,
        max_running=100,
        policy=Fair(),
        prefill_policy=Chunked(200),
        min_chunk=4,
    )
    rig.add("leader", DOCUMENT, max_tokens=1)
    rig.step()
    compared = 0

    class Watched(bytes):
        def __ne__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return bytes(self) != other

        __hash__ = bytes.__hash__

    for i in range(40):
        rig.add(f"q{i}", [*DOCUMENT, 90 + i % 9, i % 50], max_tokens=1)
        chain = rig.scheduler.state.waiting[f"q{i}"].chain  # type: ignore[index]
        chain[:] = map(Watched, chain)
    schedule = rig.scheduler.schedule(0.0)
    assert set(schedule.reasons.values()) == {Reason.PREFIX}
    assert 0 < compared < 40 * 20
