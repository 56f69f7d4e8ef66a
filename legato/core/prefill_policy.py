"""How many tokens of a prompt a step computes.

A policy proposes a length. The scheduler limits it to the tokens of the sequence and to the budget, whatever
the policy says.
"""

from dataclasses import dataclass
from typing import Protocol

from legato.errors import ConfigError


class PrefillPolicy(Protocol):
    """Chooses the length of the next chunk of a prompt."""

    @property
    def whole(self) -> bool:
        """Whether a prompt longer than the budget may run in a step of its own, above the budget."""
        ...

    def chunk_len(self, remaining: int, budget: int, alone: bool) -> int:
        """The number of tokens to compute now. 0 leaves the prompt out of this step.

        `remaining` >= 1 is the number of tokens still to compute, `budget` >= 0 the number of tokens left in
        the step. `alone` says that the step is empty so far.
        """
        ...


@dataclass(frozen=True, slots=True)
class WholePrompt:
    """No chunking: a prompt runs in one step. A prompt longer than the budget runs in a step of its own."""

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
            raise ConfigError(f"a prefill chunk must have at least 1 token, not {self.chunk}")

    def chunk_len(self, remaining: int, budget: int, alone: bool) -> int:  # noqa: ARG002
        return min(remaining, self.chunk, budget)


@dataclass(frozen=True, slots=True)
class FillBudget:
    """All tokens that the decodes leave of the budget, C = B - D. So all steps have about the same size."""

    whole = False

    def chunk_len(self, remaining: int, budget: int, alone: bool) -> int:  # noqa: ARG002
        return min(remaining, budget)


def split(n: int, chunk: int) -> list[tuple[int, int]]:
    """The chunks (start, length) of a prompt of `n` tokens that is alone in the engine.

    Together they cover 0 .. n exactly once, in order. A `chunk` of 0 means 1.
    """
    chunk = max(chunk, 1)
    return [(start, min(chunk, n - start)) for start in range(0, n, chunk)]
