"""How long a step takes: predicted from what is in it, learned from the steps that ran.

    seconds = pace (step + head [something is sampled] + decode (d + scored rows) + prefill p
                    + context (positions that decodes read)
                    + pair (sum over chunks of (2 start + length) length))

`step` and `head` are paid once, mostly to read the weights: the LM head's by itself, for a step that only
works on the middle of prompts never touches it. `decode` and `prefill` are the linear layers, token by
token. The last two are attention: a decode reads every position up to its own, and a chunk of L tokens from
position s on reads s + 1, .., s + L of them, which is half of (2 s + L) L.

The six prices are the non-negative least squares of *relative* errors, so that a step of 20 ms counts as
much as one of 500. `pace` is what they cannot say of decodes alone, of prompts alone and of both together,
and how the machine feels at the moment: near 1. Knows no clock, no request and no budget.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from legato.core.least_squares import Sums, sample_sums, solve_nonnegative

KEEP = 0.9
"""What a sample still counts once the next one like it has come: about the last ten of each kind decide."""
PRIOR_WEIGHT = 0.02
"""What one made-up sample of the prior counts."""
OUTLIER = 3.0
"""A sample that is off by more than so many usual errors counts less, in proportion (Huber 1964)."""
USUAL = 8
"""Steps whose median error is the usual one: few, so that a machine that has become slower is no outlier for
long."""
LEAST_ERROR = 0.01
"""The usual error is taken to be at least this: else what is exact would teach nothing more."""
LEAST_STEP = 1e-6
"""Seconds; so nothing is ever predicted to take no time."""
PACE_STEP = 0.1
"""Share of each error that goes into the pace."""
FAMILIAR, EVERY, SETTLED = 32, 16, 0.05
"""Once so many steps of a kind were learned from, one in so many moves the prices: solving for them takes
longer than scheduling a step. All do that come while the pace is further from 1 than this."""
WINDOW = 256
"""Predictions over which errors and the margin are taken."""
MARGIN_QUANTILE = 0.95


class StepShape(NamedTuple):
    """All of a step that its time depends on."""

    num_decodes: int
    num_prefill: int
    """Tokens in chunks."""
    decode_context: int
    """Positions that the decodes read, over all of them."""
    prefill_pairs: int
    """Sum over chunks of (2 start + length) length: twice their pairs of query and key."""
    samples: bool
    """Whether any row becomes a token."""
    num_scored: int = 0
    """Rows whose logits score prompt tokens: the LM head computes them, so each is priced as a decode."""

    @property
    def mix(self) -> int:
        """0: decodes alone. 1: prompts alone. 2: both."""
        return 0 if not self.num_prefill else 2 if self.num_decodes else 1


def shape_of(runs: Iterable[tuple[int, int, bool]]) -> StepShape:
    """Of runs (start, length, whether its last position is sampled). One of a single token is a decode: to a
    model there is no difference."""
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
    """The prices: seconds, none negative."""

    step: float
    head: float
    decode: float
    prefill: float
    context: float
    pair: float
    pace: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """By `StepShape.mix`."""

    def seconds(self, shape: StepShape) -> float:
        """Predicted seconds of a step."""
        num_decodes, num_prefill, decode_context, prefill_pairs, samples, num_scored = shape
        return self.pace[shape.mix] * (
            self.step
            + self.head * samples
            + self.decode * (num_decodes + num_scored)
            + self.prefill * num_prefill
            + self.context * decode_context
            + self.pair * prefill_pairs
        )

    def times(self, factor: float) -> "StepCost":
        """The prices of a machine on which every step takes `factor` times as long."""
        return replace(self, **{name: factor * getattr(self, name) for name in PRICES})

    def left_beside(self, decodes: StepShape, seconds: float) -> float:
        """What a step of `seconds` leaves for chunks beside decodes; before the pace, as the `chunk_*`."""
        mixed = self.pace[2 if decodes.num_decodes else 1]
        return seconds / mixed - self.seconds(decodes) / self.pace[decodes.mix]

    def chunk_seconds(self, start: int, length: int, num_scored: int = 0) -> float:
        """What a chunk adds to a step. One of a single token is a decode, as in `shape_of`."""
        if length == 1:
            return self.decode * (1 + num_scored) + self.context * (start + 1)
        pairs = (2 * start + length) * length
        return self.prefill * length + self.decode * num_scored + self.pair * pairs

    def chunk_within(self, seconds: float, start: int, *, scored: bool = False) -> float:
        """The longest chunk from position `start` on, all of it `scored` or none, that adds at most `seconds`
        to a step.

        A real number, infinite if chunks cost nothing, 0 if no time is left: where `chunk_seconds(start, L)`
        is `seconds`, if the chunk has more than one token.
        """
        if seconds <= 0:
            return 0.0
        linear = self.prefill + 2 * start * self.pair + self.decode * scored
        # this form of the root is no difference of near numbers, and holds for pair = 0 as well
        divisor = linear + math.sqrt(linear * linear + 4 * self.pair * seconds)
        return 2 * seconds / divisor if divisor else math.inf

    def knee(self, loss: float) -> float:
        """Seconds of chunks in a step of prompts alone that spends the share `loss` on what it costs whatever
        its size."""
        return self.step * (1 - loss) / loss


PRICES = ("step", "head", "decode", "prefill", "context", "pair")

PRIOR = StepCost(step=0.01, head=0.005, decode=1e-3, prefill=1e-3, context=1e-7, pair=5e-8)
"""What is believed before anything is measured: a small model on two slow cores. Too slow is the safe side:
the first steps are short, and every one of them teaches."""
PRIOR_ERROR = 0.1
PRIOR_SHAPES = (
    StepShape(1, 0, 100, 0, True),
    StepShape(16, 0, 1_600, 0, True),
    StepShape(16, 0, 160_000, 0, True),
    StepShape(0, 64, 0, 64 * 64, False),
    StepShape(0, 512, 0, 512 * 512, True),
    StepShape(0, 512, 0, 8_192 * 512, False),
)


class CostModel:
    """A `StepCost` that learns. Of bounded size; the same calls give the same prices.

    Steps of one kind (so many decodes, so many tokens in chunks, so long contexts: each to a power of two)
    are kept together, as sums that fade only when more of the same kind come. So hours of steady load do not
    make it forget what a long prompt costs.
    """

    def __init__(self, samples: Sequence[tuple[StepShape, float]] = (), *, prior: StepCost = PRIOR) -> None:
        """`samples` are steps that were measured before: shape and seconds of each. The prior is scaled to
        them: on a machine ten times as slow nearly all would be outliers to it."""
        if samples:
            prior = prior.times(quantile([taken / prior.seconds(shape) for shape, taken in samples], 0.5))
        self.cost = prior
        """The prices as of now."""
        self._prices = {name: getattr(prior, name) for name in PRICES}
        self._kinds: dict[tuple[int, ...], Sums] = {}
        self._seen: Counter[tuple[int, ...]] = Counter()  # steps of each kind
        self._total: Sums = [0.0] * (len(PRICES) * (len(PRICES) + 1))
        """Over all kinds."""
        self._errors = deque([PRIOR_ERROR] * 8, maxlen=WINDOW)
        """|measured / predicted - 1| of the last steps."""
        self._ratios = deque([1 + PRIOR_ERROR] * 8, maxlen=WINDOW)
        """measured / predicted of the last steps in which chunks ran beside decodes."""
        self.margin = 1 + PRIOR_ERROR
        """Times a prediction, it holds for `MARGIN_QUANTILE` of the steps. At least 1."""
        for shape in PRIOR_SHAPES:
            self._add(shape, kind_of(shape), prior.seconds(shape), PRIOR_WEIGHT)
        for shape, seconds in samples:
            self.note(shape, seconds)
        if samples:
            self._judge(samples)

    def error(self, q: float) -> float:
        """The `q` quantile of the relative errors of the last predictions, each made before its step ran."""
        return quantile(self._errors, q)

    def note(self, shape: StepShape, seconds: float) -> None:
        """A step took so long."""
        if seconds <= 0:  # a clock that stands still teaches nothing
            return
        ratio = seconds / self.cost.seconds(shape)
        usual = quantile(islice(reversed(self._errors), USUAL), 0.5)
        tolerated = OUTLIER * max(usual, LEAST_ERROR)
        kind = kind_of(shape)
        self._seen[kind] += 1
        settled = self._seen[kind] > FAMILIAR and abs(self.cost.pace[shape.mix] - 1) <= SETTLED
        if not settled or self._seen[kind] % EVERY == 0:
            residual = abs(1 / ratio - 1)  # as the least squares count it: of what was measured
            self._add(shape, kind, seconds, min(1.0, tolerated / residual) if residual else 1.0)
            self._prices = dict(zip(PRICES, solve_nonnegative(self._total, len(PRICES)), strict=True))
            self._prices["step"] = max(self._prices["step"], LEAST_STEP)
        self._note_error(shape, ratio)
        pace = list(self.cost.pace)
        pace[shape.mix] *= min(max(ratio, 1 / (1 + tolerated)), 1 + tolerated) ** PACE_STEP
        self.cost = StepCost(**self._prices, pace=(pace[0], pace[1], pace[2]))

    def _judge(self, samples: Sequence[tuple[StepShape, float]]) -> None:
        """Take errors and margin from what was learned, not from the way there."""
        self._errors.clear()
        self._ratios.clear()
        self.margin = 1 + PRIOR_ERROR
        for shape, seconds in samples:
            self._note_error(shape, seconds / self.cost.seconds(shape))

    def _note_error(self, shape: StepShape, ratio: float) -> None:
        self._errors.append(abs(ratio - 1))
        if shape.mix == 2:
            self._ratios.append(ratio)
            self.margin = max(1.0, quantile(self._ratios, MARGIN_QUANTILE))

    def _add(self, shape: StepShape, kind: tuple[int, ...], seconds: float, weight: float) -> None:
        num_decodes, num_prefill, decode_context, prefill_pairs, samples, num_scored = shape
        features = 1, samples, num_decodes + num_scored, num_prefill, decode_context, prefill_pairs
        row = [x / seconds for x in features]
        new = sample_sums(row, weight)
        old = self._kinds.get(kind, [0.0] * len(new))
        self._kinds[kind] = [KEEP * was + more for was, more in zip(old, new, strict=True)]
        change = zip(self._total, old, new, strict=True)
        self._total = [total - (1 - KEEP) * was + more for total, was, more in change]


def kind_of(shape: StepShape) -> tuple[int, ...]:
    """Steps of one kind are alike: decodes, tokens in chunks and mean context, each to a power of two."""
    context = shape.decode_context // max(shape.num_decodes, 1)
    context += shape.prefill_pairs // max(shape.num_prefill, 1)
    return shape.num_decodes.bit_length(), shape.num_prefill.bit_length(), (context >> 10).bit_length()


def quantile(values: Iterable[float], q: float) -> float:
    """The least of the values that at least the share `q` of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)]
