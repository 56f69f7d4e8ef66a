"""Who is preempted, against the definition: every rank computed anew for every choice, slowly."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from legato.core.block_pool import BlockPool
from legato.core.preemption import choose_victims, recompute_cost, seniority
from legato.core.request import Request, RequestId
from legato.core.sequence import Sequence
from legato.sampling_params import SamplingParams

SIZE = 4


def is_needy(sequence: Sequence) -> bool:
    return len(sequence.tokens) > len(sequence.block_table) * SIZE


def obvious_victims(running: list[Sequence], pool: BlockPool) -> list[Sequence]:
    missing = sum(map(is_needy, running)) - pool.num_free
    left = [s for s in running if s is not min(running, key=seniority) and not s.guaranteed]
    victims: list[Sequence] = []
    while missing > 0 and left:
        released = Counter(block for victim in victims for block in victim.block_table)
        freed = {s: sum(pool.num_holders(b) - released[b] == 1 for b in s.block_table) for s in left}

        def rank(sequence: Sequence, missing: int = missing, freed: dict[Sequence, int] = freed) -> object:
            own = is_needy(sequence)
            gain = min(own + freed[sequence], missing)
            if not gain:
                return (1, 0, 0, -sequence.arrival_index)
            price = (SIZE + recompute_cost(sequence, gain - own, SIZE)) / gain
            weight = 1 + sequence.num_preemptions
            return (0, -sequence.request.priority, price * weight, -sequence.arrival_index)

        victims.append(min(left, key=rank))  # type: ignore[type-var,arg-type]
        left.remove(victims[-1])
        missing -= is_needy(victims[-1]) + freed[victims[-1]]
    return victims


def a_running(
    pool: BlockPool,
    number: int,
    *,
    shared: list[int] | None = None,
    num_own: int,
    num_computed: int,
    needy: bool = False,
    priority: int = 0,
    guaranteed: bool = False,
    num_preemptions: int = 0,
) -> Sequence:
    """One that holds `shared` and as many blocks of its own; a needy one has a token more than they hold."""
    shared = shared or []
    for block in shared:
        pool.register(block, block.to_bytes(2, "big"))
    pool.share(shared)
    own = pool.try_take(num_own)
    assert own is not None
    blocks = [*shared, *own]
    request = Request(
        id=RequestId(f"r{number}"),
        prompt=(1,) * (len(blocks) * SIZE + needy),
        params=SamplingParams(max_tokens=50),
        arrival=0.0,
        priority=priority,
    )
    sequence = Sequence(
        request,
        arrival_index=number,
        chain=[b""],
        guaranteed=guaranteed,
        arrival_step=0,
        arrival_virtual_time=0.0,
    )
    sequence.block_table, sequence.num_computed, sequence.num_preemptions = (
        blocks,
        num_computed,
        num_preemptions,
    )
    return sequence


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Sequence], BlockPool]:
    """Running sequences that hold prefixes of each other's blocks, and a pool with few blocks free."""
    pool = BlockPool(100, SIZE)
    running: list[Sequence] = []
    for number in range(draw(st.integers(1, 9))):
        like = draw(st.sampled_from(running)).block_table if running else []
        shared = like[: draw(st.integers(0, len(like)))]
        num_own = draw(st.integers(int(not shared), 4))
        needy = draw(st.booleans())
        most_computed = (len(shared) + num_own) * SIZE - (not needy)
        sequence = a_running(
            pool,
            number,
            shared=shared,
            num_own=num_own,
            num_computed=draw(st.integers(0, most_computed)),
            needy=needy,
            priority=draw(st.integers(-1, 1)),
            guaranteed=draw(st.integers(0, 4)) == 0,
            num_preemptions=draw(st.integers(0, 2)),
        )
        running.append(sequence)
    pool.try_take(max(pool.num_free - draw(st.integers(0, 3)), 0))
    return running, pool


@given(worlds())
@settings(max_examples=300, deadline=None)
def test_the_victims_are_those_of_the_definition(world: tuple[list[Sequence], BlockPool]) -> None:
    running, pool = world
    expected = [victim.id for victim in obvious_victims(running, pool)]
    assert [victim.id for victim in choose_victims(running, pool)] == expected


def test_blocks_that_a_victim_leaves_to_one_other_make_that_one_cheaper() -> None:
    """4 blocks are missing. The least urgent gives its own place and 1 block; the one that shared 2 with it
    gives 3 then, and is cheaper than the one with the shorter text, which frees 1 as before."""
    pool = BlockPool(10, SIZE)
    certain = [
        a_running(pool, number, num_own=1, num_computed=4, needy=True, guaranteed=True) for number in range(3)
    ]
    first = a_running(pool, 3, num_own=3, num_computed=12, needy=True, priority=1)
    sharer = a_running(pool, 4, shared=first.block_table[:2], num_own=1, num_computed=11)
    short = a_running(pool, 5, num_own=1, num_computed=3)
    pool.try_take(pool.num_free)
    running = [*certain, first, sharer, short]
    assert choose_victims(running, pool) == obvious_victims(running, pool) == [first, sharer]
