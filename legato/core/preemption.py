"""Which sequences lose their blocks if the running sequences need more blocks than are free.

A preempted sequence keeps its tokens, and its computed blocks stay registered in the pool until they are
taken, the last ones first. So it loses only as many blocks at its end as are really needed, and only these
are computed again. The victim is the sequence with the lowest recompute cost per freed block.

Guaranteed sequences and the most senior sequence are never preempted. So the most senior one always finishes.
"""

from collections import Counter
from collections.abc import Iterable

from legato.core.block_pool import BlockPool
from legato.core.sequence import Sequence

DOUBLE_COST_CONTEXT = 4096
"""The context at which attention doubles the cost of a token, compared with a token at position 0."""


def recompute_cost(sequence: Sequence, num_taken: int, block_size: int) -> float:
    """The cost of computing again what is lost with the last `num_taken` blocks, in tokens at position 0.

    The block that is only partly computed is lost in any case, and at least one token is always computed.
    """
    computed = sequence.num_computed
    kept = min((len(sequence.block_table) - num_taken) * block_size, computed // block_size * block_size)
    lost = computed - max(kept, 0)
    return lost * (1 + computed / DOUBLE_COST_CONTEXT)


def seniority(sequence: Sequence) -> tuple[bool, int, int]:
    """A sort key: the most senior sequence comes first."""
    return (not sequence.guaranteed, sequence.request.priority, sequence.arrival_index)


def choose_victims(running: Iterable[Sequence], pool: BlockPool) -> list[Sequence]:
    """The sequences to preempt so that all other decodes get their next block. Empty if no block is missing.

    The most urgent priority is preempted last. Within a priority, the cheapest sequence is preempted first,
    and each earlier preemption makes a sequence more expensive.
    """
    everyone, size = list(running), pool.block_size
    # Prompts never need a block: they got all their blocks when they were admitted.
    in_need = {s for s in everyone if len(s.tokens) > len(s.block_table) * size}
    missing = len(in_need) - pool.num_free
    if missing <= 0:
        return []
    senior = min(everyone, key=seniority)
    candidates = [sequence for sequence in everyone if sequence is not senior and not sequence.guaranteed]
    gains = {s: pool.num_exclusive(s.block_table) + (1 if s in in_need else 0) for s in candidates}
    ranks = {sequence: _rank(sequence, gains[sequence], missing, pool) for sequence in candidates}
    victims: list[Sequence] = []
    released: Counter[int] = Counter()
    while missing > 0 and ranks:
        victim = min(ranks, key=ranks.__getitem__)
        del ranks[victim]
        missing -= gains.pop(victim)
        victims.append(victim)
        released.update(victim.block_table)
        one_holder = {b for b in victim.block_table if pool.num_holders(b) - released[b] == 1}
        for sequence, gain in gains.items():
            more = len(one_holder.intersection(sequence.block_table)) if one_holder else 0
            if more or gain > missing:  # Nothing else changes a rank.
                gains[sequence] = gain + more
                ranks[sequence] = _rank(sequence, gain + more, missing, pool)
    return victims


def _rank(sequence: Sequence, gain: int, missing: int, pool: BlockPool) -> tuple[float, ...]:
    """A sort key, the first victim first: the recompute cost per freed block.

    `gain` is the number of blocks that a preemption makes available: those that only this sequence holds,
    plus one if it needs a block itself. At most `missing` blocks are taken, so only their content is
    computed again.
    """
    gain = min(gain, missing)
    if gain == 0:  # All its blocks are shared. It helps only together with the other holders.
        return (1, 0, 0, -sequence.arrival_index)
    num_taken = gain - 1 if sequence.needs_block(pool.block_size) else gain
    # The pause of a reply counts as much as one block, so that few sequences are preempted.
    cost = pool.block_size + recompute_cost(sequence, num_taken, pool.block_size)
    cost_per_block = cost / gain * (1 + sequence.num_preemptions)
    return (0, -sequence.request.priority, cost_per_block, -sequence.arrival_index)
