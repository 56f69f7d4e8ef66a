"""Prefixes that are computed once: what is found, when, by whom, and what is never shared."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import VOCAB, Rig, build_rig, expected_reply

from legato.core.block_pool import BlockPool
from legato.core.decision import MAX_REFUSED
from legato.core.events import TokenEvent
from legato.core.prefill_policy import Chunked
from legato.core.prefix_index import extend, private_root, shared_root
from legato.core.request import RequestId
from legato.core.schedule import Reason
from legato.core.scheduling_policy import Fair

ROOT = shared_root("")


def starts(rig: Rig, name: str) -> list[int]:
    """Where each chunk of a request started."""
    return [run.start for s in rig.schedules for run in s.chunks if run.request_id == name]


def cached(rig: Rig, name: str) -> int:
    """What its events say of its cached tokens; the same in all of them."""
    (num,) = {e.num_cached for e in rig.events if isinstance(e, TokenEvent) and e.request_id == name}
    return num


def chain(tokens: list[int], size: int, salt: str = "") -> list[bytes]:
    digests = [shared_root(salt)]
    extend(digests, tokens, size)
    return digests


# -- digests ----------------------------------------------------------------------------------------------


@given(
    a=st.lists(st.integers(0, 3), max_size=12),
    b=st.lists(st.integers(0, 3), max_size=12),
    size=st.integers(1, 4),
)
def test_digests_are_equal_as_far_as_the_texts_are_and_no_further(
    a: list[int], b: list[int], size: int
) -> None:
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    pairs = list(zip(chain(a, size), chain(b, size), strict=False))
    assert [x == y for x, y in pairs] == [i * size <= common for i in range(len(pairs))]


def test_a_chain_grows_to_the_same_digests_whatever_the_pieces() -> None:
    whole, tokens = chain(list(range(10)), 3), list(range(10))
    grown = [ROOT]
    for end in (0, 1, 4, 4, 9, 10):
        extend(grown, tokens[:end], 3)
    assert grown == whole
    assert len(whole) == 1 + 3, "a block that is not full has no digest"


def test_roots_are_different_for_every_salt_and_request_and_kind() -> None:
    roots = [shared_root(""), shared_root("a"), private_root(0), private_root(1), shared_root("\ud800")]
    assert len(set(roots)) == len(roots)


# -- the pool against an oracle ---------------------------------------------------------------------------


class SlowPool:
    """The pool in the simplest words: a list of what nobody holds, first to be taken first."""

    def __init__(self, num_blocks: int) -> None:
        self.blank = list(range(num_blocks))
        self.cached: list[int] = []
        self.holders = dict.fromkeys(range(num_blocks), 0)
        self.known: dict[int, bytes] = {}

    def take(self, num: int) -> list[int] | None:
        queue = self.blank + self.cached
        if num > len(queue):
            return None
        for block in queue[:num]:
            self.known.pop(block, None)
            self.holders[block] = 1
        self.blank = self.blank[num:]
        self.cached = [block for block in self.cached if block not in queue[:num]]
        return queue[:num]

    def find(self, digests: list[bytes]) -> list[int]:
        found = []
        for digest in digests:
            holding = [block for block, known in self.known.items() if known == digest]
            if not holding:
                break
            found += holding
        return found

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            self.holders[block] += 1
        self.cached = [block for block in self.cached if block not in blocks]

    def register(self, block: int, digest: bytes) -> None:
        if digest not in self.known.values() and block not in self.known:
            self.known[block] = digest

    def release(self, blocks: list[int]) -> None:
        for block in blocks[::-1]:
            self.holders[block] -= 1
            if not self.holders[block]:
                (self.cached.append if block in self.known else self._blank)(block)

    def _blank(self, block: int) -> None:
        self.blank.insert(0, block)


@given(st.data())
def test_the_pool_does_what_the_slow_pool_does(data: st.DataObject) -> None:
    """Sequences of a small alphabet take, share, publish and release; after each call both agree."""
    pool, slow = BlockPool(8, 2), SlowPool(8)
    held: list[tuple[list[bytes], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            _, blocks = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pool.release(blocks)
            slow.release(blocks)
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=8))
            digests = chain(tokens, 2)[1:]
            found = pool.find(digests)
            assert found == slow.find(digests)
            pool.share(found)
            slow.share(found)
            taken = pool.try_take(len(digests) - len(found))
            assert taken == slow.take(len(digests) - len(found))
            if taken is None:
                pool.release(found)
                slow.release(found)
            else:
                held.append((digests, found + taken))
                for block, digest in zip(found + taken, digests, strict=True):
                    pool.register(block, digest)
                    slow.register(block, digest)
        pool.check()
        assert pool.num_free == len(slow.blank) + len(slow.cached)
        assert pool.num_cached == len(slow.cached)
        assert {block: pool.num_holders(block) for block in range(8)} == slow.holders
        assert {block: pool.digest(block) for block in range(8) if pool.is_registered(block)} == slow.known


def test_the_least_recently_used_is_evicted_and_tails_before_heads() -> None:
    pool, digests = BlockPool(4, 1), chain([1, 2, 3, 4], 1)[1:]
    first, second = pool.try_take(2), pool.try_take(2)
    assert first is not None
    assert second is not None
    for block, digest in zip(first + second, digests, strict=True):
        pool.register(block, digest)
    pool.release(first)
    pool.release(second)
    assert pool.num_cached == pool.num_free == 4
    assert [pool.try_take(1) for _ in range(4)] == [[first[1]], [first[0]], [second[1]], [second[0]]]


def test_only_a_known_block_can_be_shared() -> None:
    pool = BlockPool(2, 1)
    with pytest.raises(RuntimeError, match="not registered"):
        pool.share([0])
    pool.check()


# -- what is found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_fully_cached_prompt_of_whole_blocks_still_computes_its_last_block(num_blocks: int) -> None:
    """E-05: exactly 1 and 2 blocks, twice in a row; cached tokens are the length less a block."""
    rig = build_rig(block_size=4)
    prompt = list(range(4 * num_blocks))
    for name in ("first", "again"):
        rig.add(name, prompt, max_tokens=3)
        rig.run()
        assert rig.tokens(name) == expected_reply(prompt, 3)
    assert starts(rig, "again") == [4 * (num_blocks - 1)]
    assert (cached(rig, "first"), cached(rig, "again")) == (0, 4 * (num_blocks - 1))
    rig.assert_idle()


@pytest.mark.parametrize("chunk", [3, 4, 8, 16])
def test_the_same_prompt_twice_at_the_same_time(chunk: int) -> None:
    """E-05, E-11: nothing is found before it is computed, and both answers are right."""
    rig = build_rig(budget=32, block_size=4, prefill_policy=Chunked(chunk))
    prompt = list(range(16))
    rig.add("a", prompt, max_tokens=3)
    rig.add("b", prompt, max_tokens=3)
    rig.run()
    assert rig.tokens("a") == rig.tokens("b") == expected_reply(prompt, 3)
    rig.assert_idle()


def test_a_block_is_found_only_after_the_step_that_filled_it() -> None:
    """E-11: a common prefix of 3 blocks; its first chunk is still being computed when the second comes."""
    rig = build_rig(budget=16, block_size=4, prefill_policy=Chunked(6))
    prefix = list(range(12))
    a, b = rig.add("a", [*prefix, 50], max_tokens=2), rig.add("b", [*prefix, 60], max_tokens=2)
    assert rig.scheduler.state.find_prefix(rig.scheduler.state.sequence(b.id)) == []
    step = rig.begin()
    assert rig.scheduler.state.find_prefix(rig.scheduler.state.sequence(b.id)) == [], (
        "taken, but not computed"
    )
    rig.finish(step)
    found = rig.scheduler.state.find_prefix(rig.scheduler.state.sequence(b.id))
    assert found == rig.scheduler.state.sequence(a.id).block_table[:1], (
        "of 6 computed tokens, one full block of 4"
    )
    rig.run()
    for request in (a, b):
        assert rig.tokens(request.id) == expected_reply(request.prompt, 2)


def test_a_prompt_with_another_tail_finds_the_common_blocks() -> None:
    """E-13: cold, warm, with another tail, and after half the blocks were taken: the tokens are the same."""
    rig = build_rig(budget=64, num_blocks=8, block_size=4)
    prompt = list(range(20))
    for name in ("cold", "warm"):
        rig.add(name, prompt, max_tokens=4)
        rig.run()
    rig.add("tail", [*prompt[:10], 70, 71, 72], max_tokens=4)
    rig.run()
    assert (cached(rig, "cold"), cached(rig, "warm"), cached(rig, "tail")) == (0, 16, 8)
    rig.add("other", range(50, 68), max_tokens=4)  # 6 of 8 blocks: evicts most of what is known
    rig.run()
    rig.add("half", prompt, max_tokens=4)
    rig.run()
    assert 0 < cached(rig, "half") < 16
    for name in ("cold", "warm", "half"):
        assert rig.tokens(name) == expected_reply(prompt, 4)
    assert rig.tokens("tail") == expected_reply([*prompt[:10], 70, 71, 72], 4)
    rig.assert_idle()


def test_the_reply_is_found_by_the_next_turn_of_the_conversation() -> None:
    rig = build_rig(block_size=4)
    rig.add("turn 1", range(6), max_tokens=7)
    rig.run()
    rig.add("turn 2", [*range(6), *rig.tokens("turn 1"), 9, 9], max_tokens=2)
    rig.run()
    assert cached(rig, "turn 2") == 12, "all that was computed: 6 + 7 - 1"


@pytest.mark.parametrize(
    ("first", "second", "found"), [("", "", 8), ("a", "a", 8), ("a", "b", 0), ("", "a", 0)]
)
def test_only_requests_with_the_same_salt_share(first: str, second: str, found: int) -> None:
    rig = build_rig(budget=16, block_size=4)
    for name, salt in (("first", first), ("second", second)):
        rig.add(name, range(10), max_tokens=2, salt=salt)
        rig.run()
    assert cached(rig, "second") == found
    assert rig.tokens("first") == rig.tokens("second")


def test_without_prefix_cache_nobody_shares_and_nothing_changes() -> None:
    """E-13: the control run."""
    rig = build_rig(budget=16, block_size=4, prefix_cache=False)
    for name in ("first", "second"):
        rig.add(name, range(10), max_tokens=4)
        rig.run()
        assert rig.tokens(name) == expected_reply(range(10), 4)
    assert cached(rig, "second") == 0
    assert rig.tokens("first") == rig.tokens("second")


def test_without_prefix_cache_a_request_does_not_share_with_an_earlier_one_of_its_id() -> None:
    rig = build_rig(budget=16, block_size=4, prefix_cache=False)
    for _ in range(2):
        rig.add("same", range(10), max_tokens=4)
        rig.run()
    assert cached(rig, "same") == 0


def test_many_followers_do_not_keep_others_out_of_the_room_that_they_leave() -> None:
    rig = build_rig(budget=16, max_running=16, block_size=4, prefill_policy=Chunked(4), num_blocks=200)
    for i in range(MAX_REFUSED + 2):
        rig.add(f"reply{i}", range(40), max_tokens=1)
    rig.add("other", range(50, 90), max_tokens=1)
    schedule = rig.step()
    assert [run.request_id for run in schedule.runs] == ["reply0", "other"]
    assert set(schedule.reasons.values()) == {Reason.PREFIX}


# -- room -------------------------------------------------------------------------------------------------


def test_only_uncached_tokens_count_in_the_budget() -> None:
    """D-12: tokens, blocks and the cached prefix are one decision; who is left out holds nothing."""
    rig = build_rig(budget=8, block_size=4)
    rig.add("first", range(16), max_tokens=1)
    rig.run()
    for i in range(3):
        rig.add(f"r{i}", [*range(16), 80 + i], max_tokens=1)
    schedule = rig.step()
    assert [(run.start, run.length) for run in schedule.chunks] == [(16, 1)] * 3
    assert schedule.num_tokens == 3
    rig.assert_idle()


def test_cached_blocks_that_two_newcomers_share_are_counted_once() -> None:
    """D-12: 4 cached blocks and 2 others: enough for two prompts of 5 blocks that share 4."""
    rig = build_rig(budget=32, num_blocks=6, block_size=4)
    rig.add("first", range(17), max_tokens=1)
    rig.run()
    rig.add("a", [*range(16), 70], max_tokens=1)
    rig.add("b", [*range(16), 71], max_tokens=1)
    schedule = rig.step()
    assert len(schedule.admitted) == 2
    rig.assert_idle()


def test_a_cached_block_is_not_free_for_who_shares_it() -> None:
    """3 blocks are held and 3 cached. Who shares 2 of these and needs 2 more has to wait."""
    rig = build_rig(budget=32, num_blocks=6, block_size=4)
    rig.add("first", range(12), max_tokens=1)
    rig.run()
    rig.add("holder", range(40, 51), max_tokens=2)
    again = rig.add("again", [*range(8), *range(80, 88)], max_tokens=1)
    schedule = rig.step()
    assert schedule.admitted == ("holder",)
    assert schedule.reasons == {again.id: Reason.BLOCKS}
    rig.run()
    assert cached(rig, "again") == 8


def test_a_prefix_in_a_pool_smaller_than_the_context_is_served_and_let_go() -> None:
    """D-18: the cache is warm, the pool nearly full of it, logprobs on, as long a reply as possible."""
    rig = build_rig(budget=8, num_blocks=6, block_size=4)
    rig.add("warm", range(16), max_tokens=4)
    rig.run()
    request = rig.add("long", range(16), max_tokens=8, logprobs=2)
    rig.run(max_steps=20)
    assert rig.tokens("long") == expected_reply(request.prompt, 8)
    assert cached(rig, "long") == 12
    rig.assert_idle()
    assert all(rig.scheduler.state.pool.num_holders(block) == 0 for block in range(6))


def test_what_one_shares_is_not_evicted_by_those_admitted_with_it() -> None:
    """The prefix lies in the oldest cached blocks, and a newcomer of the same step needs blocks."""
    rig = build_rig(budget=64, num_blocks=7, block_size=4)
    for name, prompt in (("old", range(9)), ("new", range(30, 46))):
        rig.add(name, prompt, max_tokens=1)
        rig.run()
    rig.add("big", range(60, 72), max_tokens=1)
    again = rig.add("again", [*range(8), 5], max_tokens=2)
    schedule = rig.step()
    assert set(schedule.admitted) == {"big", "again"}
    rig.run()
    assert rig.tokens("again") == expected_reply(again.prompt, 2)
    assert cached(rig, "again") == 8


# -- followers --------------------------------------------------------------------------------------------


def test_a_follower_waits_for_the_leader_and_computes_only_its_own_tail() -> None:
    rig = build_rig(budget=16, block_size=4, prefill_policy=Chunked(8))
    prefix = list(range(24))
    a, b = rig.add("a", [*prefix, 50], max_tokens=1), rig.add("b", [*prefix, 60, 61], max_tokens=1)
    c = rig.add("c", range(70, 75), max_tokens=1)
    schedule = rig.step()
    assert [run.request_id for run in schedule.chunks] == ["a", "c"], "who follows holds nobody up"
    assert schedule.reasons == {b.id: Reason.PREFIX}
    rig.run()
    assert starts(rig, "b") == [24]
    assert len(rig.schedules) == 4, "as many steps as the leader alone"
    for request in (a, b, c):
        assert rig.tokens(request.id) == expected_reply(request.prompt, 1)


@pytest.mark.parametrize("num_left", [1, 2, 8])
def test_a_follower_ends_in_the_share_kept_for_those_once_its_prefix_is_there(num_left: int) -> None:
    """It was long when it came; what is left is at most half of a step, and a longer one comes before it."""
    rig = build_rig(budget=16, block_size=4, num_blocks=64, policy=Fair())
    prefix = list(range(30, 62))
    rig.add("leader", prefix, max_tokens=1)
    rig.add("follower", [*prefix, *range(num_left)], max_tokens=1)
    rig.step()
    rig.step()
    rig.add("other", [9] * 16, max_tokens=1)
    assert list(rig.scheduler.state.waiting) == ["other", "follower"]
    schedule = rig.step()
    assert [(run.request_id, run.start) for run in schedule.chunks] == [("follower", 32), ("other", 0)]


def test_a_follower_whose_leader_leaves_goes_on_by_itself() -> None:
    rig = build_rig(budget=16, block_size=4, prefill_policy=Chunked(4))
    prefix = list(range(24))
    rig.add("a", prefix, max_tokens=1)
    b = rig.add("b", prefix, max_tokens=1)
    assert rig.step().reasons == {b.id: Reason.PREFIX}
    rig.scheduler.abort(RequestId("a"))
    rig.run()
    assert starts(rig, "b")[0] == 4, "with what was computed by then"
    assert rig.tokens("b") == expected_reply(prefix, 1)
    rig.assert_idle()


def test_nobody_follows_a_leader_that_is_slower_than_itself() -> None:
    """The leader gets a crumb of what the follower would get: it does not wait."""

    class Halting:
        whole = False

        def chunk_len(self, remaining: int, budget: int, alone: bool) -> int:  # noqa: ARG002
            return 1 if remaining % 2 else min(remaining, budget)

    rig = build_rig(budget=32, block_size=4, prefill_policy=Halting())
    prefix = list(range(24))
    rig.add("a", [*prefix, 50], max_tokens=1)
    rig.add("b", [*prefix, 60, 61], max_tokens=1)
    schedule = rig.step()
    assert [(run.request_id, run.length) for run in schedule.chunks] == [("a", 1), ("b", 26)]


def test_hits_count_once_whatever_becomes_of_the_request() -> None:
    """A preempted sequence finds its own blocks again; that is no hit."""
    rig = build_rig(budget=8, num_blocks=5, block_size=2, max_running=2)
    rig.add("A", (1, 2, 3), max_tokens=6)
    rig.add("B", (4, 5, 6), max_tokens=6)
    rig.run()
    assert any("B" in schedule.preempted for schedule in rig.schedules)
    assert cached(rig, "B") == 0
    assert starts(rig, "B")[-1] > 0
    assert all(0 <= token < VOCAB for token in rig.tokens("B"))
