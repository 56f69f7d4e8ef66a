"""How many prompt tokens may go into one step.

A step that contains decodes delays every running reply by its own duration. So prompts beside decodes get
what keeps the step within the target, and at most `max_batch_tokens` minus the decodes. Prompts alone get
what makes a step efficient.

    FixedBudget    the same number of tokens in every step
    TargetBudget   seconds, converted to tokens by the prices of a `CostModel`, which learns from every step

The target is the longest acceptable gap between two tokens of a reply, in seconds: `Request.tpot_target`, or
the server's target. In each step the strictest target of its decodes applies.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from legato.core.sequence import Sequence
from legato.cost.cost_model import CostModel
from legato.cost.step_cost import StepCost, StepShape

EFFICIENCY_LOSS = 0.05
"""In steps without decodes, the share of the time that may go into the fixed cost of a step."""
FLOOR_SHARE = 0.1
"""Prompts get at least this share of the target, or of the decodes' time if that is longer."""
ROUNDING = 1e-9
"""The relative error that sums of seconds may have."""


class LimitedBy(Enum):
    """The limit of the prompt tokens of a step."""

    TOKENS = "tokens"
    """`max_batch_tokens`. There is no target to keep."""
    TARGET = "target"
    """The target of the decodes, which is kept, or `max_batch_tokens` if that is less."""
    FLOOR = "floor"
    """The target leaves less than `FLOOR_SHARE` to prompts. They get that share, and the target may be
    missed."""
    UNREACHABLE = "unreachable"
    """The decodes alone take longer than the target. Prompts get `FLOOR_SHARE`."""
    KNEE = "knee"
    """There are no decodes, and a longer step would hardly be more efficient."""


@dataclass(slots=True)
class Allowance:
    """The part of a step that prompts may still use. It decreases as chunks are placed."""

    limited_by: LimitedBy
    tokens: int
    """The most tokens, whatever they cost."""
    target: float | None = None
    """The most seconds that the step should take."""
    margin: float = 1.0
    """The prediction is multiplied by this before it is compared with the target."""
    seconds: float = math.inf
    """Seconds left for chunks, in the sense of `StepCost.left_beside`. If infinite, only tokens count."""
    floor: float = 0.0
    """Seconds that the first chunk may take even if fewer are left.

    If this is not 0, the first chunk has at least two tokens: one token would count as a decode, and the cost
    model would learn nothing about chunks."""
    cost: StepCost | None = None
    """The prices, if the budget knows them."""

    def left(self, start: int, *, scored: bool = False) -> int:
        """The most tokens of a chunk at position `start`. Either all of its tokens are `scored`, or none."""
        if self.cost is None or self.seconds == math.inf:
            return self.tokens
        seconds = max(self.seconds, self.floor)
        fits = self.cost.chunk_within(seconds, start, scored=scored)
        if fits < 2:  # `chunk_within` does not hold for a single token, which costs as much as a decode.
            if self.floor:
                fits = 2
            else:
                num_scored = 1 if scored else 0
                fits = 1 if self.cost.chunk_seconds(start, 1, num_scored) <= seconds else 0
        return int(fits) if fits < self.tokens else self.tokens

    def shortest(self, start: int, length: int, *, scored: bool = False) -> int:
        """The number of tokens at position `start` that take as long as `length` tokens at position 0.

        Deep in a text, where each token takes longer, a shorter chunk is still worth its place in a step.
        """
        if self.cost is None or self.seconds == math.inf:
            return length
        fits = self.cost.chunk_within(self.cost.chunk_seconds(0, length), start, scored=scored)
        return max(1, int(fits)) if fits < length else length

    def split_off(self, share: float, start: int, length: int) -> "Allowance":
        """A separate allowance for a share of this one.

        Chunks within it leave enough for another chunk: the `shortest` equivalent of `length` tokens at
        position `start`.
        """
        length = self.shortest(start, length)
        tokens = min(int(self.tokens * share), self.tokens - length)
        if self.cost is None or self.seconds == math.inf:
            return replace(self, tokens=tokens)
        seconds = self.seconds - self.cost.chunk_seconds(start, length) * (1 + ROUNDING)
        return replace(self, tokens=tokens, seconds=min(self.seconds * share, seconds), floor=0.0)

    def take(self, start: int, length: int, num_scored: int = 0) -> None:
        """A chunk was placed. It is longer than `left` only if a policy runs whole prompts."""
        self.tokens -= length
        if self.cost is None or self.seconds == math.inf:
            return
        self.seconds -= self.cost.chunk_seconds(start, length, num_scored)
        if self.seconds < 0 and self.limited_by is LimitedBy.TARGET:
            self.limited_by = LimitedBy.FLOOR
        self.floor = 0.0


class Budget(Protocol):
    """Gives each step an allowance, and learns how long each step took."""

    def allow(self, decodes: Seq[Sequence]) -> Allowance:
        """The part of a step that prompts may use beside these decodes. Changes nothing."""
        ...

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took `seconds`, from its decision to its tokens."""
        ...

    @property
    def prompt_token_seconds(self) -> float | None:
        """The predicted seconds of one prompt token. None if the budget does not depend on time."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """`max_batch_tokens` in every step, decodes included: C = B - D (Agrawal et al. 2023)."""

    max_batch_tokens: int

    def allow(self, decodes: Seq[Sequence]) -> Allowance:
        return Allowance(LimitedBy.TOKENS, self.max_batch_tokens - len(decodes))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Ignored: this budget does not depend on time."""

    @property
    def prompt_token_seconds(self) -> None:
        return None


class TargetBudget:
    """Allows as many prompt tokens as the target permits, by the prices that the cost model learns."""

    def __init__(
        self, max_batch_tokens: int, model: CostModel, *, target: float | None = None, min_chunk: int = 1
    ) -> None:
        """`target` is in seconds and applies to requests without a target of their own. None: no target.

        `min_chunk` is the minimum size of a step without decodes, in tokens at position 0. Deep in a text
        such a step has fewer tokens and takes as long.
        """
        self.model = model
        self.target = target
        self._max_batch_tokens = max_batch_tokens
        self._min_chunk = min_chunk

    def allow(self, decodes: Seq[Sequence]) -> Allowance:
        tokens, cost = self._max_batch_tokens - len(decodes), self.model.cost
        if not decodes and self.target is not None:
            seconds = max(cost.efficient_seconds(EFFICIENCY_LOSS), cost.chunk_seconds(0, self._min_chunk))
            if cost.chunk_within(seconds, 0) < tokens:
                return Allowance(LimitedBy.KNEE, tokens, seconds=seconds, floor=seconds, cost=cost)
        targets = [s.request.tpot_target or self.target for s in decodes]
        target = min([seconds for seconds in targets if seconds is not None], default=None)
        if target is None:
            return Allowance(LimitedBy.TOKENS, tokens, cost=cost)
        only_decodes = StepShape(len(decodes), 0, sum([len(s.tokens) for s in decodes]), 0, True)
        decode_seconds = cost.seconds(only_decodes)
        return Allowance(
            LimitedBy.UNREACHABLE if decode_seconds > target else LimitedBy.TARGET,
            tokens,
            target=target,
            margin=self.model.margin,
            seconds=cost.left_beside(only_decodes, target / self.model.margin),
            floor=FLOOR_SHARE * max(target, decode_seconds),
            cost=cost,
        )

    def observe(self, shape: StepShape, seconds: float) -> None:
        self.model.observe(shape, seconds)

    @property
    def prompt_token_seconds(self) -> float:
        return self.model.cost.prefill
