"""Who holds which block of the KV cache. Numbers only: the tensors live in the runner.

The pool knows nothing of sequences. A block is in one of three places:

    blank    nobody holds it and nothing in it is worth keeping
    cached   nobody holds it, but its content is known by its digest: a later sequence may share it
    held     by one or more sequences; its content may be known as well

Blank blocks are taken first, then cached ones: the least recently used is evicted. Blocks come back through
`release`, the one way back.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from legato.core.prefix_index import Digest, PrefixIndex
from legato.errors import ConfigError


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each.

    Deterministic: the same calls give the same blocks. Blank blocks are taken again last in, first out, so
    that a small load stays in few, warm blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"the KV cache needs at least 1 block of at least 1 token, not {num_blocks} of {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self._holders = [0] * num_blocks
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds: what can be taken."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose content may still be shared."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` positions need."""
        return -(-num_tokens // self.block_size)

    def holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._holders[block]

    def num_exclusive(self, blocks: Iterable[int]) -> int:
        """How many of some blocks have one holder."""
        return list(map(self._holders.__getitem__, blocks)).count(1)

    def find(self, digests: Iterable[Digest]) -> list[int]:
        """The blocks that hold the longest computed prefix of a chain. Takes nothing."""
        return self._index.find(digests)

    def is_known(self, block: int) -> bool:
        """Whether the block's content is known, and so must not change."""
        return block in self._index

    def try_take(self, num: int) -> list[int] | None:
        """Take `num` blocks to write to, or None and no change if fewer are free."""
        if num > self.num_free:
            return None
        taken = []
        for _ in range(num):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._index.forget(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that `find` found, beside whoever else does."""
        for block in blocks:
            if block not in self._index:
                raise RuntimeError(f"block {block} is not known, so it cannot be shared")
            self._cached.pop(block, None)
            self._holders[block] += 1

    def publish(self, block: int, digest: Digest) -> None:
        """A held block is computed in full: from now on it may be shared."""
        self._index.add(block, digest)

    def release(self, blocks: Sequence[int]) -> None:
        """Give a sequence's blocks back, in their order: tails are evicted before what they build upon.

        Releasing a free block is a bug of ours and raises, before anything changes.
        """
        if len(set(blocks)) != len(blocks) or not all(self._holders[block] for block in blocks):
            raise RuntimeError(f"blocks released twice: {sorted(blocks)}")
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._index:
                self._cached[block] = None
            else:
                self._blank.append(block)

    def check(self) -> None:
        """Recompute everything from scratch; raises AssertionError if the pool contradicts itself."""
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free), "a block is free twice"
        assert set(free) == {b for b, num in enumerate(self._holders) if num == 0}, "free blocks and holders"
        assert all(block in self._index for block in self._cached), "a cached block that nothing knows"
        assert not any(block in self._index for block in self._blank), "a blank block that is known"

    def digest(self, block: int) -> Digest | None:
        """What a block is known for, for checks."""
        return self._index.digest(block)
