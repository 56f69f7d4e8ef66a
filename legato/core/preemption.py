"""Who loses its blocks when the running sequences need more than there are.

A preempted sequence keeps its tokens, and its computed blocks stay known in the pool until they are taken,
the last ones first. So it loses only as many tail blocks as are really needed, and that tail is what is
computed again. The victim is who has the least to compute again for each block that it frees.

Never preempted: guaranteed sequences, and the most senior one. So that one always gets on and ends.
"""

from collections import Counter
from collections.abc import Iterable

from legato.core.block_pool import BlockPool
from legato.core.sequence import Sequence

CONTEXT = 4096
"""Computed tokens at which attention makes a token cost twice what it costs at the start of a text."""


def recompute_cost(sequence: Sequence, num_taken: int, block_size: int) -> float:
    """What it costs to compute again what is lost with the last `num_taken` blocks, in tokens at the start of
    a text. The block that is computed in part is lost in any case, and one token is always computed."""
    computed = sequence.num_computed
    kept = min((len(sequence.blocks) - num_taken) * block_size, computed // block_size * block_size)
    lost = computed - max(kept, 0)
    return lost * (1 + computed / CONTEXT)


def seniority(sequence: Sequence) -> tuple[bool, int, int]:
    """The least is the most senior."""
    return (not sequence.guaranteed, sequence.request.priority, sequence.number)


def choose_victims(running: Iterable[Sequence], pool: BlockPool) -> list[Sequence]:
    """Those to preempt so that all other decodes find their next blocks; none if they do anyway.

    The most urgent class loses last; within a class the cheapest goes first, and being preempted before
    makes dearer.
    """
    left, size = list(running), pool.block_size
    needy = {
        s.id for s in left if len(s.tokens) > len(s.blocks) * size
    }  # decodes: prompts have all they need
    missing = len(needy) - pool.num_free
    if missing <= 0:
        return []
    left.remove(min(left, key=seniority))
    left = [sequence for sequence in left if not sequence.guaranteed]
    victims: list[Sequence] = []
    released: Counter[int] = Counter()
    while missing > 0 and left:
        own = [int(sequence.id in needy) for sequence in left]
        freed = [_num_freed(sequence, released, pool) for sequence in left]
        ranks = [_rank(*one, missing, pool) for one in zip(left, own, freed, strict=True)]
        choice = ranks.index(min(ranks))
        victims.append(left.pop(choice))
        missing -= own[choice] + freed[choice]
        released.update(victims[-1].blocks)
    return victims


def _rank(sequence: Sequence, own: int, freed: int, missing: int, pool: BlockPool) -> tuple[float, ...]:
    """The least is preempted first. Without it, `own` blocks fewer are missing and `freed` more are there; of
    these only so many are taken as are missing, and only what was in them is computed again."""
    gain = min(own + freed, missing)
    if gain == 0:  # all its blocks are shared: it helps only together with those that share them
        return (1, 0, 0, -sequence.number)
    pause = pool.block_size  # that a reply stops for a while counts as much as a block: rather few victims
    cost = pause + recompute_cost(sequence, max(gain - own, 0), pool.block_size)
    return (0, -sequence.request.priority, cost / gain * (1 + sequence.num_preemptions), -sequence.number)


def _num_freed(sequence: Sequence, released: Counter[int], pool: BlockPool) -> int:
    """Blocks that nobody else holds, once those `released` are."""
    return sum(1 for block in sequence.blocks if pool.holders(block) - released[block] == 1)
