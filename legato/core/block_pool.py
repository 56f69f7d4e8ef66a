"""Which blocks of the KV cache are held, cached or blank. The tensors are in the runner.

The pool does not know sequences. Each block is in one of three states:

    blank    no sequence holds it, and its content is worthless
    cached   no sequence holds it, but its content is registered under a digest, and sequences may share it
    held     one or more sequences hold it; its content may be registered as well

Blank blocks are taken first, then cached blocks, the least recently used first. `release` is the only way
to give blocks back.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from legato.core.prefix_index import Digest, PrefixIndex
from legato.errors import ConfigError


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each.

    Deterministic: the same calls give the same blocks. The blank block that was released last is taken first,
    so that a small load stays in few blocks that are warm in the CPU cache.
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
        self._num_holders = [0] * num_blocks
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds. All of them can be taken."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be shared."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks for `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def num_holders(self, block: int) -> int:
        """The number of sequences that hold a block."""
        return self._num_holders[block]

    def num_exclusive(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` have exactly one holder."""
        return list(map(self._num_holders.__getitem__, blocks)).count(1)

    def find(self, digests: Iterable[Digest]) -> list[int]:
        """The blocks of the longest computed prefix of a chain. Changes nothing."""
        return self._index.find(digests)

    def is_registered(self, block: int) -> bool:
        """Whether the block's content is registered. Such a block must not be written."""
        return block in self._index

    def try_take(self, num: int) -> list[int] | None:
        """Take `num` blocks to write to. Returns None, and changes nothing, if fewer are free."""
        if num > self.num_free:
            return None
        taken = []
        for _ in range(num):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._index.remove(block)
            self._num_holders[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that `find` returned."""
        for block in blocks:
            if block not in self._index:
                raise RuntimeError(f"block {block} is not registered, so it cannot be shared")
            self._cached.pop(block, None)
            self._num_holders[block] += 1

    def register(self, block: int, digest: Digest) -> None:
        """Register the content of a held block that is fully computed. From now on it may be shared."""
        self._index.add(block, digest)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back the blocks of a sequence, in the order of its block table.

        The last blocks are evicted first, because a prefix is useless without its beginning. Raises
        RuntimeError, before anything changes, if a block is free already: that is a bug in Legato.
        """
        if len(set(blocks)) != len(blocks) or not all(self._num_holders[block] for block in blocks):
            raise RuntimeError(f"blocks released twice: {sorted(blocks)}")
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if block in self._index:
                self._cached[block] = None
            else:
                self._blank.append(block)

    def check(self) -> None:
        """Recompute everything from scratch. Raises AssertionError if the pool contradicts itself."""
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free), "a block is free twice"
        assert set(free) == {b for b, num in enumerate(self._num_holders) if num == 0}, (
            "free blocks and holders"
        )
        assert all(block in self._index for block in self._cached), "a cached block is not registered"
        assert not any(block in self._index for block in self._blank), "a blank block is registered"

    def digest(self, block: int) -> Digest | None:
        """The digest under which a block is registered. For checks."""
        return self._index.digest(block)
