"""The predicted time of one engine step: a linear model of what is in it.

    seconds = correction * (step + head [something is sampled] + decode (D + scored rows) + prefill P
                            + context (positions that decodes read)
                            + pair (sum over chunks of (2 start + length) length))

D is the number of decodes and P the number of tokens in chunks. `step` and `head` are paid once per step,
mostly to read the weights; the LM head is separate because a step that only works on the middle of prompts
skips it. `decode` and `prefill` are the linear layers, per token. The last two terms are attention: a decode
reads every position up to its own. A chunk of L tokens at position s reads s + 1, .., s + L positions, which
is half of (2 s + L) L.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple


class StepShape(NamedTuple):
    """Everything in a step that its time depends on."""

    num_decodes: int
    num_prefill: int
    """Tokens in chunks."""
    decode_context: int
    """Positions that the decodes read, summed over all decodes."""
    prefill_pairs: int
    """Sum over chunks of (2 start + length) length: twice the number of query-key pairs."""
    samples: bool
    """Whether the step samples any token, so that the LM head runs."""
    num_scored: int = 0
    """Rows whose logits score prompt tokens. The LM head computes them, so each costs as much as a decode."""

    @property
    def mix(self) -> int:
        """0: only decodes. 1: only prompts. 2: both."""
        if not self.num_prefill:
            return 0
        return 2 if self.num_decodes else 1


def shape_of(runs: Iterable[tuple[int, int, bool]]) -> StepShape:
    """The shape of runs (start, length, whether the last position is sampled).

    A run of one token counts as a decode: the model does the same work for both.
    """
    num_decodes = num_prefill = context = pairs = 0
    samples = False
    for start, length, sampled in runs:
        if length == 1:
            num_decodes += 1
            context += start + 1
        else:
            num_prefill += length
            pairs += (2 * start + length) * length
        samples = samples or sampled
    return StepShape(num_decodes, num_prefill, context, pairs, samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The coefficients of the model, called prices. Seconds, never negative."""

    step: float
    head: float
    decode: float
    prefill: float
    context: float
    pair: float
    correction: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Factors close to 1, indexed by `StepShape.mix`, for what the prices do not capture."""

    def seconds(self, shape: StepShape) -> float:
        """The predicted seconds of a step."""
        num_decodes, num_prefill, decode_context, prefill_pairs, samples, num_scored = shape
        return self.correction[shape.mix] * (
            self.step
            + (self.head if samples else 0.0)
            + self.decode * (num_decodes + num_scored)
            + self.prefill * num_prefill
            + self.context * decode_context
            + self.pair * prefill_pairs
        )

    def times(self, factor: float) -> "StepCost":
        """The prices of a machine on which every step takes `factor` times as long."""
        return replace(self, **{name: factor * getattr(self, name) for name in PRICES})

    def left_beside(self, decodes: StepShape, seconds: float) -> float:
        """The seconds for chunks in a step of `seconds` that also runs `decodes`.

        The result is uncorrected, as are `chunk_seconds` and `chunk_within`.
        """
        mixed = self.correction[2 if decodes.num_decodes else 1]
        return seconds / mixed - self.seconds(decodes) / self.correction[decodes.mix]

    def chunk_seconds(self, start: int, length: int, num_scored: int = 0) -> float:
        """The seconds that a chunk adds to a step. A chunk of one token costs as much as a decode."""
        if length == 1:
            return self.decode * (1 + num_scored) + self.context * (start + 1)
        pairs = (2 * start + length) * length
        return self.prefill * length + self.decode * num_scored + self.pair * pairs

    def chunk_within(self, seconds: float, start: int, *, scored: bool = False) -> float:
        """The length of the longest chunk at position `start` that adds at most `seconds` to a step.

        All of the chunk's positions are `scored`, or none. The result is a real number: the solution L of
        `chunk_seconds(start, L) == seconds` for chunks of more than one token. It is infinite if chunks cost
        nothing and 0 if `seconds` is not positive.
        """
        if seconds <= 0:
            return 0.0
        linear = self.prefill + 2 * start * self.pair + (self.decode if scored else 0.0)
        # This form of the root subtracts no nearly equal numbers, and also holds for pair = 0.
        divisor = linear + math.sqrt(linear * linear + 4 * self.pair * seconds)
        return 2 * seconds / divisor if divisor else math.inf

    def efficient_seconds(self, loss: float) -> float:
        """The seconds of chunks after which a step without decodes spends only the share `loss` of its time
        on its fixed cost."""
        return self.step * (1 - loss) / loss


PRICES = ("step", "head", "decode", "prefill", "context", "pair")
