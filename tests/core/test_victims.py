"""Who is preempted, against the definition: every rank computed anew for every choice, slowly."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from legato.core.block_pool import BlockPool
from legato.core.preemption import choose_victims, recompute_cost, seniority
from legato.core.request import Request, RequestId, SamplingParams
from legato.core.sequence import Sequence

SIZE = 4


def is_needy(sequence: Sequence) -> bool:
    return len(sequence.tokens) > len(sequence.blocks) * SIZE


def obvious_victims(running: list[Sequence], pool: BlockPool) -> list[Sequence]:
    missing = sum(map(is_needy, running)) - pool.num_free
    left = [s for s in running if s is not min(running, key=seniority) and not s.guaranteed]
    victims: list[Sequence] = []
    while missing > 0 and left:
        released = Counter(block for victim in victims for block in victim.blocks)
        freed = {s: sum(pool.holders(b) - released[b] == 1 for b in s.blocks) for s in left}

        def rank(sequence: Sequence, missing: int = missing, freed: dict[Sequence, int] = freed) -> object:
            own = is_needy(sequence)
            gain = min(own + freed[sequence], missing)
            if not gain:
                return (1, 0, 0, -sequence.number)
            price = (SIZE + recompute_cost(sequence, gain - own, SIZE)) / gain
            weight = 1 + sequence.num_preemptions
            return (0, -sequence.request.priority, price * weight, -sequence.number)

        victims.append(min(left, key=rank))  # type: ignore[type-var,arg-type]
        left.remove(victims[-1])
        missing -= is_needy(victims[-1]) + freed[victims[-1]]
    return victims


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Sequence], BlockPool]:
    """Running sequences that hold prefixes of each other's blocks, and a pool with few blocks free."""
    num = draw(st.integers(1, 9))
    pool = BlockPool(100, SIZE)
    running: list[Sequence] = []
    for number in range(num):
        like = draw(st.sampled_from(running)).blocks if running else []
        shared = like[: draw(st.integers(0, len(like)))]
        for block in shared:
            pool.publish(block, block.to_bytes(2, "big"))
        pool.share(shared)
        own = pool.try_take(draw(st.integers(int(not shared), 4)))
        assert own is not None
        num_computed = draw(st.integers(0, (len(shared) + len(own)) * SIZE))
        num_known = max(num_computed + 1, (len(shared) + len(own)) * SIZE + draw(st.integers(0, 1)))
        request = Request(
            id=RequestId(f"r{number}"),
            prompt=(1,) * num_known,
            params=SamplingParams(max_tokens=50),
            arrival=0.0,
            priority=draw(st.integers(-1, 1)),
        )
        guaranteed = draw(st.integers(0, 4)) == 0
        sequence = Sequence(
            request, number=number, chain=[b""], guaranteed=guaranteed, entry_step=0, entry_time=0.0
        )
        sequence.blocks, sequence.num_computed = [*shared, *own], num_computed
        sequence.num_preemptions = draw(st.integers(0, 2))
        running.append(sequence)
    pool.try_take(max(pool.num_free - draw(st.integers(0, 3)), 0))
    return running, pool


@given(worlds())
@settings(max_examples=300, deadline=None)
def test_the_victims_are_those_of_the_definition(world: tuple[list[Sequence], BlockPool]) -> None:
    running, pool = world
    expected = [victim.id for victim in obvious_victims(running, pool)]
    assert [victim.id for victim in choose_victims(running, pool)] == expected
