"""Learns what a step costs from the steps that ran.

The six prices of `StepCost` are the non-negative least-squares solution for *relative* errors, so that a
step of 20 ms counts as much as one of 500 ms. A correction factor for each mix of work (only decodes, only
prompts, both) covers what the prices miss and how fast the machine is at the moment.

This module knows no clock, no request and no budget.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice

from legato.cost.least_squares import Sums, sample_sums, solve_nonnegative
from legato.cost.step_cost import PRICES, StepCost, StepShape

DECAY = 0.9
"""The weight of a sample is multiplied by this when the next sample of its bucket arrives. About the last ten
samples of each bucket decide."""
PRIOR_WEIGHT = 0.02
"""The weight of each sample of the prior."""
OUTLIER_ERRORS = 3.0
"""A sample whose error exceeds this multiple of the typical error is weighted down in proportion (Huber
1964)."""
TYPICAL_OVER = 8
"""The typical error is the median over this many steps. The number is small, so that a machine that has
become slower is treated as an outlier only briefly."""
MIN_TYPICAL_ERROR = 0.01
"""The typical error is never taken to be smaller, or an exact model would treat every new step as an
outlier."""
MIN_STEP_PRICE = 1e-6
"""Seconds. It keeps every prediction above zero."""
CORRECTION_RATE = 0.1
"""The share of each error that goes into the correction factor."""
MIN_SAMPLES = 32
"""The prices are solved for again on every step until its bucket has this many samples,"""
REFIT_EVERY = 16
"""then on every 16th, because solving takes longer than scheduling a step,"""
DRIFT = 0.05
"""unless the correction factor is off from 1 by more than this."""
WINDOW = 256
"""The number of predictions over which errors and the margin are measured."""
MARGIN_QUANTILE = 0.95

PRIOR = StepCost(step=0.01, head=0.005, decode=1e-3, prefill=1e-3, context=1e-7, pair=5e-8)
"""The prices before anything was measured: a small model on two slow cores. It is safe to be too slow: the
first steps are short, and the model learns from each of them."""
PRIOR_ERROR = 0.1
PRIOR_SHAPES = (
    StepShape(1, 0, 100, 0, True),
    StepShape(16, 0, 1_600, 0, True),
    StepShape(16, 0, 160_000, 0, True),
    StepShape(0, 64, 0, 64 * 64, False),
    StepShape(0, 512, 0, 512 * 512, True),
    StepShape(0, 512, 0, 8_192 * 512, False),
)

Bucket = tuple[int, ...]


class CostModel:
    """A `StepCost` that learns. Its size is bounded, and the same calls give the same prices.

    Steps with similar shapes share a bucket of sums. The sums decay only when more steps of the same bucket
    arrive. So hours of steady load do not make the model forget what a long prompt costs.
    """

    def __init__(self, samples: Sequence[tuple[StepShape, float]] = (), *, prior: StepCost = PRIOR) -> None:
        """`samples` are (shape, seconds) of steps that were measured before.

        The prior is scaled to them. Otherwise nearly all samples of a machine ten times as slow would be
        outliers.
        """
        if samples:
            prior = prior.times(quantile([taken / prior.seconds(shape) for shape, taken in samples], 0.5))
        self.cost = prior
        """The current prices."""
        self._prices = {name: getattr(prior, name) for name in PRICES}
        self._buckets: dict[Bucket, Sums] = {}
        self._num_seen: Counter[Bucket] = Counter()
        self._total: Sums = [0.0] * (len(PRICES) * (len(PRICES) + 1))
        """The sums over all buckets."""
        self._errors = deque([PRIOR_ERROR] * 8, maxlen=WINDOW)
        """|measured / predicted - 1| of the last steps."""
        self._ratios = deque([1 + PRIOR_ERROR] * 8, maxlen=WINDOW)
        """measured / predicted of the last steps in which chunks ran beside decodes."""
        self.margin = 1 + PRIOR_ERROR
        """A prediction times the margin holds for `MARGIN_QUANTILE` of the steps. At least 1."""
        for shape in PRIOR_SHAPES:
            self._add(shape, bucket_of(shape), prior.seconds(shape), PRIOR_WEIGHT)
        for shape, seconds in samples:
            self.observe(shape, seconds)
        if samples:
            self._reset_errors(samples)

    def error(self, q: float) -> float:
        """The `q` quantile of the relative errors of the last predictions. Each was made before its step
        ran."""
        return quantile(self._errors, q)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn that a step of this shape took `seconds`."""
        if seconds <= 0:  # A clock that stands still teaches nothing.
            return
        ratio = seconds / self.cost.seconds(shape)
        typical = quantile(islice(reversed(self._errors), TYPICAL_OVER), 0.5)
        tolerated = OUTLIER_ERRORS * max(typical, MIN_TYPICAL_ERROR)
        if self._must_refit(shape):
            residual = abs(1 / ratio - 1)  # relative to the measured time, as in the least squares
            weight = min(1.0, tolerated / residual) if residual else 1.0
            self._add(shape, bucket_of(shape), seconds, weight)
            self._prices = dict(zip(PRICES, solve_nonnegative(self._total, len(PRICES)), strict=True))
            self._prices["step"] = max(self._prices["step"], MIN_STEP_PRICE)
        self._note_error(shape, ratio)
        correction = list(self.cost.correction)
        correction[shape.mix] *= min(max(ratio, 1 / (1 + tolerated)), 1 + tolerated) ** CORRECTION_RATE
        self.cost = StepCost(**self._prices, correction=(correction[0], correction[1], correction[2]))

    def _must_refit(self, shape: StepShape) -> bool:
        """Count a step in its bucket, and decide whether the prices are solved for again."""
        bucket = bucket_of(shape)
        self._num_seen[bucket] += 1
        num_seen = self._num_seen[bucket]
        has_drifted = abs(self.cost.correction[shape.mix] - 1) > DRIFT
        return num_seen <= MIN_SAMPLES or has_drifted or num_seen % REFIT_EVERY == 0

    def _reset_errors(self, samples: Sequence[tuple[StepShape, float]]) -> None:
        """Measure errors and margin with the final prices, not with those on the way."""
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

    def _add(self, shape: StepShape, bucket: Bucket, seconds: float, weight: float) -> None:
        num_decodes, num_prefill, decode_context, prefill_pairs, samples, num_scored = shape
        head = 1 if samples else 0
        features = 1, head, num_decodes + num_scored, num_prefill, decode_context, prefill_pairs
        new = sample_sums([feature / seconds for feature in features], weight)
        old = self._buckets.get(bucket, [0.0] * len(new))
        self._buckets[bucket] = [DECAY * before + added for before, added in zip(old, new, strict=True)]
        changes = zip(self._total, old, new, strict=True)
        self._total = [total - (1 - DECAY) * before + added for total, before, added in changes]


def bucket_of(shape: StepShape) -> Bucket:
    """The bucket of a step: decodes, tokens in chunks and mean context, each to a power of two."""
    context = shape.decode_context // max(shape.num_decodes, 1)
    context += shape.prefill_pairs // max(shape.num_prefill, 1)
    return shape.num_decodes.bit_length(), shape.num_prefill.bit_length(), (context >> 10).bit_length()


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest of `values` that at least the share `q` of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)]
