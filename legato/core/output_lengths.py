"""Estimates how long replies get, from the replies that ended.

Lengths are counted in buckets of powers of two, together with their tokens. So the mean length of all replies
longer than a bucket takes two look-ups. The weight of old replies decays, because traffic changes.
"""

from itertools import accumulate

DECAY = 0.98
"""The weight of a reply is multiplied by this whenever another reply ends. About the last 50 decide."""


class OutputLengthEstimator:
    """`guess` is the expected length before any reply has ended. It counts as much as `weight` replies."""

    def __init__(self, *, guess: int = 128, weight: float = 4.0) -> None:
        self._counts = [0.0] * 64
        self._tokens = [0.0] * 64
        self._means: list[float] = []
        """The mean length of the replies in each bucket and above. 0 if their weight is negligible."""
        self._add(guess, weight)

    def observe(self, length: int) -> None:
        """A reply ended with a stop token or its maximum length, after `length` tokens."""
        self._counts = [DECAY * count for count in self._counts]
        self._tokens = [DECAY * tokens for tokens in self._tokens]
        self._add(length, 1.0)

    def remaining(self, num_generated: int) -> float:
        """The expected number of further tokens, at least 1, of a reply that has `num_generated` and
        continues.

        It is taken from the mean of all longer replies. A reply longer than all others is assumed to be half
        done.
        """
        bucket = num_generated.bit_length()
        is_longer_than_mean = self._tokens[bucket] <= num_generated * self._counts[bucket]
        first = bucket + 1 if is_longer_than_mean else bucket
        mean = self._means[first] or 2.0 * num_generated
        return max(mean - num_generated, 1.0)

    def _add(self, length: int, weight: float) -> None:
        self._counts[length.bit_length()] += weight
        self._tokens[length.bit_length()] += weight * length
        longer = zip(accumulate(reversed(self._counts)), accumulate(reversed(self._tokens)), strict=True)
        means = [tokens / count if count > 1e-6 else 0.0 for count, tokens in longer]
        self._means = [*reversed(means), 0.0]
