"""Maps tokens to the blocks that hold their K and V, with a chain of hashes.

The digest of a block depends on its own tokens and on all tokens before it. So equal digests mean equal K
and V. The hash is SHA-256, so no client can construct two texts with the same digest.

A chain begins with a root. Requests share blocks only if they have the same root: that of their cache salt,
or, without prefix sharing, one that belongs to a single request.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

Digest = bytes


def shared_root(salt: str) -> Digest:
    """The root of all requests with the same cache salt."""
    return hashlib.sha256(b"salt " + salt.encode(errors="surrogatepass")).digest()


def private_root(arrival_index: int) -> Digest:
    """The root of a single request. It is made from its index because request ids can be reused."""
    return hashlib.sha256(b"request %d" % arrival_index).digest()


def extend(chain: list[Digest], tokens: Sequence[int], block_size: int) -> None:
    """Append the digest of every full block of `tokens` that `chain` does not have yet.

    `chain[0]` is the root, and `chain[i + 1]` is the digest of block i.
    """
    layout = struct.Struct(f"<{block_size}q")
    for end in range(len(chain) * block_size, len(tokens) + 1, block_size):
        data = layout.pack(*tokens[end - block_size : end])
        chain.append(hashlib.sha256(chain[-1] + data).digest())


class PrefixIndex:
    """A two-way map between digests and blocks. It does not know which sequences hold a block."""

    def __init__(self) -> None:
        self._block_of: dict[Digest, int] = {}
        self._digest_of: dict[int, Digest] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def add(self, block: int, digest: Digest) -> None:
        """Register the content of a block. If two sequences computed the same content, the first block
        stays."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def find(self, digests: Iterable[Digest]) -> list[int]:
        """The blocks of the longest registered prefix of a chain (without its root)."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def remove(self, block: int) -> None:
        """Forget a block that is about to be overwritten."""
        del self._block_of[self._digest_of.pop(block)]

    def digest(self, block: int) -> Digest | None:
        """The registered digest of a block, if there is one."""
        return self._digest_of.get(block)
