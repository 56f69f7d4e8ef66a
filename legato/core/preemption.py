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
    everyone, size = list(running), pool.block_size
    needy = {s for s in everyone if len(s.tokens) > len(s.blocks) * size}  # prompts have all they need
    missing = len(needy) - pool.num_free
    if missing <= 0:
        return []
    senior = min(everyone, key=seniority)
    choice = [sequence for sequence in everyone if sequence is not senior and not sequence.guaranteed]
    gains = {sequence: (sequence in needy) + pool.num_exclusive(sequence.blocks) for sequence in choice}
    ranks = {sequence: _rank(sequence, gains[sequence], missing, pool) for sequence in choice}
    victims: list[Sequence] = []
    released: Counter[int] = Counter()
    while missing > 0 and ranks:
        victim = min(ranks, key=ranks.__getitem__)
        del ranks[victim]
        missing -= gains.pop(victim)
        victims.append(victim)
        released.update(victim.blocks)
        left_to_one = {block for block in victim.blocks if pool.holders(block) - released[block] == 1}
        for sequence, gain in gains.items():
            more = len(left_to_one.intersection(sequence.blocks)) if left_to_one else 0
            if more or gain > missing:  # nothing else changes a rank
                gains[sequence] = gain + more
                ranks[sequence] = _rank(sequence, gain + more, missing, pool)
    return victims


def _rank(sequence: Sequence, gain: int, missing: int, pool: BlockPool) -> tuple[float, ...]:
    """The least is preempted first. Without it `gain` blocks fewer are missing: one if it needs one, and
    those that it frees. As many are taken as are missing; only what was in them is computed again."""
    gain = min(gain, missing)
    if gain == 0:  # all its blocks are shared: it helps only together with those that share them
        return (1, 0, 0, -sequence.number)
    own = len(sequence.tokens) > len(sequence.blocks) * pool.block_size
    pause = pool.block_size  # that a reply stops for a while counts as much as a block: rather few victims
    cost = pause + recompute_cost(sequence, gain - own, pool.block_size)
    return (0, -sequence.request.priority, cost / gain * (1 + sequence.num_preemptions), -sequence.number)
