"""Which computed blocks hold which tokens: a chain of hashes, block after block.

A block's digest stands for its own tokens and for all before them, so equal digests mean equal K and V. It
is a SHA-256: nobody can make two texts that share one, by accident or on purpose.

The chain begins with a root. Requests share blocks only under the same root: that of their tenant's salt, or,
with prefix sharing turned off, one of their own.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

Digest = bytes


def shared_root(salt: str) -> Digest:
    """The root of all requests with the same salt."""
    return hashlib.sha256(b"salt " + salt.encode(errors="surrogatepass")).digest()


def private_root(number: int) -> Digest:
    """The root of one request alone, the `number`-th: an id may be used again."""
    return hashlib.sha256(b"request %d" % number).digest()


def extend(chain: list[Digest], tokens: Sequence[int], block_size: int) -> None:
    """Bring a chain up to date: a digest for every full block of `tokens` that has none yet.

    `chain[0]` is the root and `chain[i + 1]` the digest of block i.
    """
    form = struct.Struct(f"<{block_size}q")
    for end in range(len(chain) * block_size, len(tokens) + 1, block_size):
        data = form.pack(*tokens[end - block_size : end])
        chain.append(hashlib.sha256(chain[-1] + data).digest())


class PrefixIndex:
    """Digest -> block and back. Knows nothing of who holds a block."""

    def __init__(self) -> None:
        self._block_of: dict[Digest, int] = {}
        self._digest_of: dict[int, Digest] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def add(self, block: int, digest: Digest) -> None:
        """Note what a block holds. If two sequences computed the same, the first one's block stays known."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def find(self, digests: Iterable[Digest]) -> list[int]:
        """The blocks of the longest known prefix of a chain (without its root)."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def forget(self, block: int) -> None:
        """The block is about to be written anew."""
        del self._block_of[self._digest_of.pop(block)]

    def digest(self, block: int) -> Digest | None:
        """What the block is known for, if anything."""
        return self._digest_of.get(block)
