"""How much of a prompt may go into one step: the budgets.

A step that holds decodes delays every reply in it by as long as it takes. So the prompts beside them get
what keeps the step within the target, and no more than `max_tokens`; prompts alone get what makes a step
efficient.

    FixedBudget    always the same number of tokens
    TargetBudget   seconds, turned into tokens with the prices of a step (`cost`), and learned from every step

The target is the longest gap between two tokens of one reply, in seconds: `Request.tpot_target`, or the
server's. The strictest of those that decode rules.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from legato.core.cost import CostModel, StepCost, StepShape

if TYPE_CHECKING:
    from legato.core.sequence import Sequence

KNEE_LOSS = 0.05
"""Share of a step's time, when only prompts run, that may go into what every step costs whatever its size."""
FLOOR_SHARE = 0.1
"""Prompts get at least this share of the target, or of the decodes' time if that is longer."""
ROUNDING = 1e-9
"""Share by which sums of seconds may be off."""


class Limit(Enum):
    """What bounds the prompt tokens of a step."""

    TOKENS = "tokens"
    """`max_batch_tokens`: there is no target to keep."""
    TARGET = "target"
    """The target of those that decode, which is kept; or `max_batch_tokens`, where that is less."""
    FLOOR = "floor"
    """The target leaves prompts less than `FLOOR_SHARE`; they get that, and the target may be missed."""
    UNREACHABLE = "unreachable"
    """The decodes alone take longer than the target; prompts get `FLOOR_SHARE`."""
    KNEE = "knee"
    """Nothing decodes, and a longer step would hardly be more efficient."""


@dataclass(slots=True)
class Allowance:
    """What prompts may still take of one step. It counts down as chunks are placed."""

    limit: Limit
    tokens: int
    """The most tokens, whatever they cost."""
    target: float | None = None
    """Seconds that the step may take."""
    margin: float = 1.0
    """What its prediction is multiplied by before it is compared with the target."""
    seconds: float = math.inf
    """Seconds left for chunks, as `StepCost.left_beside` counts them. Infinite: only tokens count."""
    floor: float = 0.0
    """Seconds that the first chunk may take even if fewer are left; if not 0, it has at least two tokens: one
    would count as a decode, and nothing would be learned of steps with chunks."""
    cost: StepCost | None = None
    """The prices, if the budget knows them."""

    def left(self, start: int, *, scored: bool = False) -> int:
        """The most tokens of a chunk from position `start` on, all of it `scored` or none."""
        if self.cost is None or self.seconds == math.inf:
            return self.tokens
        seconds = max(self.seconds, self.floor)
        fits = self.cost.chunk_within(seconds, start, scored=scored)
        if fits < 2:  # a single token has a price of its own
            fits = 2 if self.floor else int(self.cost.chunk_seconds(start, 1, int(scored)) <= seconds)
        return int(fits) if fits < self.tokens else self.tokens

    def shortest(self, start: int, length: int, *, scored: bool = False) -> int:
        """The tokens from position `start` on that take as long as `length` tokens at the start of a text.

        Where seconds count, a chunk far into a text may be shorter and is still worth its place in a step.
        """
        if self.cost is None or self.seconds == math.inf:
            return length
        fits = self.cost.chunk_within(self.cost.chunk_seconds(0, length), start, scored=scored)
        return max(1, int(fits)) if fits < length else length

    def share(self, part: float, start: int, length: int) -> "Allowance":
        """A part of it to count down by itself. Chunks that keep to it leave the `shortest` chunk for
        `length` tokens from position `start` on."""
        length = self.shortest(start, length)
        tokens = min(int(self.tokens * part), self.tokens - length)
        if self.cost is None or self.seconds == math.inf:
            return replace(self, tokens=tokens)
        seconds = self.seconds - self.cost.chunk_seconds(start, length) * (1 + ROUNDING)
        return replace(self, tokens=tokens, seconds=min(self.seconds * part, seconds), floor=0.0)

    def take(self, start: int, length: int, num_scored: int = 0) -> None:
        """A chunk was placed. It is longer than `left` only where a policy runs a whole prompt."""
        self.tokens -= length
        if self.cost is None or self.seconds == math.inf:
            return
        self.seconds -= self.cost.chunk_seconds(start, length, num_scored)
        if self.seconds < 0 and self.limit is Limit.TARGET:
            self.limit = Limit.FLOOR
        self.floor = 0.0


class Budget(Protocol):
    """Opens an allowance for each step, and is told how long each took."""

    def allow(self, decodes: Seq["Sequence"]) -> Allowance:
        """What prompts may take beside these decodes. Changes nothing."""
        ...

    def note(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long, from its decision to its tokens."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """`max_tokens` in every step, decodes included: C = B - D (Agrawal et al. 2023)."""

    max_tokens: int

    def allow(self, decodes: Seq["Sequence"]) -> Allowance:
        return Allowance(Limit.TOKENS, self.max_tokens - len(decodes))

    def note(self, shape: StepShape, seconds: float) -> None:
        """Time does not matter here."""


class TargetBudget:
    """As many prompt tokens as the target allows, by the prices that it learns."""

    def __init__(
        self, max_tokens: int, model: CostModel, *, target: float | None = None, min_chunk: int = 1
    ) -> None:
        """`target` in seconds, for requests without their own; None for no such target.

        `min_chunk`: a step of prompts alone has at least as many tokens, or deep in a text as long a time.
        """
        self.model = model
        self.target = target
        self._max_tokens = max_tokens
        self._min_chunk = min_chunk

    def allow(self, decodes: Seq["Sequence"]) -> Allowance:
        tokens, cost = self._max_tokens - len(decodes), self.model.cost
        if not decodes and self.target is not None:
            seconds = max(cost.knee(KNEE_LOSS), cost.chunk_seconds(0, self._min_chunk))
            if cost.chunk_within(seconds, 0) < tokens:
                return Allowance(Limit.KNEE, tokens, seconds=seconds, floor=seconds, cost=cost)
        own = [s.request.tpot_target or self.target for s in decodes]
        target = min([seconds for seconds in own if seconds is not None], default=None)
        if target is None:
            return Allowance(Limit.TOKENS, tokens, cost=cost)
        alone = StepShape(len(decodes), 0, sum([len(s.tokens) for s in decodes]), 0, True)
        alone_seconds = cost.seconds(alone)
        return Allowance(
            Limit.UNREACHABLE if alone_seconds > target else Limit.TARGET,
            tokens,
            target=target,
            margin=self.model.margin,
            seconds=cost.left_beside(alone, target / self.model.margin),
            floor=FLOOR_SHARE * max(target, alone_seconds),
            cost=cost,
        )

    def note(self, shape: StepShape, seconds: float) -> None:
        self.model.note(shape, seconds)
