"""Pseudo-random numbers that are a function of (seed, index): no generator, no state, nothing to rewind.

A draw therefore does not depend on the batch it is in, on the order of rows, or on how often its request was
preempted. This file does not know what the numbers are used for.
"""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def random64(seed: int, index: int) -> int:
    """Uniform integer in [0, 2**64): number `index` of the stream of `seed` (any integer, taken mod 2**64).

    SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") read as a counter.
    The seed is mixed first: raw seeds that differ by a multiple of gamma would share one stream, shifted.
    """
    return _mix(_mix(seed & _MASK) + (index + 1) * _GAMMA)


def _mix(z: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit integers in which each input bit moves about half the
    output bits."""
    z &= _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
