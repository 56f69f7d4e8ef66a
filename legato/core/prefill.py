"""How many of a prompt's tokens a step takes: the prefill policies, one line each.

A policy proposes; the scheduler disposes: it never lets a chunk pass the end of the sequence or the budget,
whatever a policy says.
"""

from dataclasses import dataclass
from typing import Protocol

from legato.errors import ConfigError


class PrefillPolicy(Protocol):
    """Chooses the length of the next chunk of a prompt."""

    @property
    def whole(self) -> bool:
        """Whether a prompt longer than the budget may run in a step of its own, over the budget."""
        ...

    def chunk_len(self, remaining: int, budget: int, alone: bool) -> int:
        """Tokens to prefill now.

        `remaining` >= 1 tokens of the sequence are still to compute, `budget` >= 0 tokens are left in the
        step, `alone` says that the step is empty so far. 0 means: not in this step.
        """
        ...


@dataclass(frozen=True, slots=True)
class WholePrompt:
    """No chunking: a prompt runs in one step, and one longer than the budget only in a step of its own."""

    whole = True

    def chunk_len(self, remaining: int, budget: int, alone: bool) -> int:
        return remaining if remaining <= budget or alone else 0


@dataclass(frozen=True, slots=True)
class Chunked:
    """At most `chunk` tokens of each prompt in each step (Agrawal et al. 2023, SARATHI)."""

    chunk: int
    whole = False

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ConfigError(f"a prefill chunk holds at least 1 token, not {self.chunk}")

    def chunk_len(self, remaining: int, budget: int, alone: bool) -> int:  # noqa: ARG002
        return min(remaining, self.chunk, budget)


@dataclass(frozen=True, slots=True)
class FillBudget:
    """Whatever the decodes leave of the budget: C = B - D, so that every step has about the same size."""

    whole = False

    def chunk_len(self, remaining: int, budget: int, alone: bool) -> int:  # noqa: ARG002
        return min(remaining, budget)


def split(n: int, chunk: int) -> list[tuple[int, int]]:
    """The chunks (start, length) of a prompt of `n` tokens that is alone in the engine.

    They cover 0 .. n once, in order; a `chunk` of 0 means 1.
    """
    chunk = max(chunk, 1)
    return [(start, min(chunk, n - start)) for start in range(0, n, chunk)]
