"""How long replies get: learned from those that ended, asked for those that run.

Lengths are counted in buckets of powers of two, with the tokens in each, so that a mean over "all replies
longer than this" is two look-ups. Old replies count less and less: traffic changes.
"""

from itertools import accumulate

FADE = 0.98
"""What a reply still counts once the next one has ended: about the last 50 decide."""


class ReplyLengths:
    """`guess` is what a reply is taken for before any has ended; it counts as much as `weight` replies."""

    def __init__(self, *, guess: int = 128, weight: float = 4.0) -> None:
        self._counts = [0.0] * 64
        self._tokens = [0.0] * 64
        self._means: list[float] = []
        """Mean length of the replies in this bucket and all above it; 0 if there are none to speak of."""
        self._add(guess, weight)

    def note(self, length: int) -> None:
        """A reply ended by its own rule after `length` tokens."""
        self._counts = [FADE * count for count in self._counts]
        self._tokens = [FADE * tokens for tokens in self._tokens]
        self._add(length, 1.0)

    def remaining(self, generated: int) -> float:
        """Expected further tokens, at least 1, of a reply that has `generated` and goes on.

        The mean of all longer ones; a reply that outlived all others is half done, as far as anyone knows.
        """
        bucket = generated.bit_length()
        is_behind = self._tokens[bucket] <= generated * self._counts[bucket]  # of those in its own bucket
        mean = self._means[bucket + is_behind] or 2.0 * generated
        return max(mean - generated, 1.0)

    def _add(self, length: int, weight: float) -> None:
        self._counts[length.bit_length()] += weight
        self._tokens[length.bit_length()] += weight * length
        longer = zip(accumulate(reversed(self._counts)), accumulate(reversed(self._tokens)), strict=True)
        means = [tokens / count if count > 1e-6 else 0.0 for count, tokens in longer]
        self._means = [*reversed(means), 0.0]
