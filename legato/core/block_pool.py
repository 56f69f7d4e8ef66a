"""Who holds which block of the KV cache. Numbers only: the tensors live in the runner.

The pool knows nothing of sequences. A block is either free or held by whoever took it; blocks come back
through `release`, the one way back. Prefix sharing will add reference counts here.
"""

from collections.abc import Sequence

from legato.errors import ConfigError


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each.

    Deterministic: the same calls give the same blocks. Freed blocks are taken again last in, first out, so
    that a small load stays in few, warm blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"the KV cache needs at least 1 block of at least 1 token, not {num_blocks} of {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` positions need."""
        return -(-num_tokens // self.block_size)

    def try_take(self, num: int) -> list[int] | None:
        """Take `num` blocks, or None and no change if fewer are free."""
        if num > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(num)]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Releasing a free block is a bug of ours and raises, before anything changes."""
        if len(set(blocks)) != len(blocks) or any(self._is_free[block] for block in blocks):
            raise RuntimeError(f"blocks released twice: {sorted(blocks)}")
        for block in reversed(blocks):
            self._is_free[block] = 1
            self._free.append(block)

    def check(self) -> None:
        """Recompute everything from scratch; raises AssertionError if the pool contradicts itself."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert all(0 <= block < self.num_blocks for block in self._free), "a free block is not in the pool"
        assert sum(self._is_free) == len(self._free), "free flags and free list disagree"
        assert all(self._is_free[block] for block in self._free), "a free block is marked as held"

    def free_blocks(self) -> frozenset[int]:
        """The free blocks, for checks."""
        return frozenset(self._free)
