"""What steps cost: the least squares against an exact oracle, and prices learned from noisy steps."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.cost.cost_model import PRIOR, CostModel, quantile
from legato.cost.least_squares import sample_sums, solve_nonnegative
from legato.cost.step_cost import PRICES, StepCost, StepShape, shape_of

TRUE = StepCost(step=0.012, head=0.006, decode=1.5e-3, prefill=6e-4, context=3e-7, pair=4e-8)
STREAMS = 8


def price(most: float, least: float = 0.0) -> st.SearchStrategy[float]:
    return st.floats(least, most, allow_subnormal=False)


COSTS = st.builds(
    StepCost,
    step=price(0.1),
    head=price(0.1),
    decode=price(0.01),
    prefill=price(0.01, 1e-6),
    context=price(1e-5),
    pair=st.one_of(st.just(0.0), price(1e-6, 1e-12)),
    correction=st.tuples(*[st.floats(0.5, 2.0)] * 3),
)

# -- shapes and prices --------------------------------------------------------------------------------------


def test_a_shape_by_hand() -> None:
    """Decodes that read 10 and 5 positions; chunks 0 .. 4 and 4 .. 7: 0 + 4 x 4 and (2 x 4 + 3) x 3."""
    shape = shape_of([(9, 1, True), (4, 1, True), (0, 4, False), (4, 3, False)])
    assert shape == StepShape(2, 7, 15, 16 + 33, True)
    cost = StepCost(step=1, head=10, decode=100, prefill=1000, context=1e4, pair=1e5, correction=(1, 1, 2))
    assert cost.seconds(shape) == 2 * (1 + 10 + 200 + 7000 + 15e4 + 49e5)
    assert [StepShape(d, p, 0, 0, False).mix for d, p in ((1, 0), (0, 1), (1, 1))] == [0, 1, 2]


@given(st.integers(0, 10_000), st.lists(st.integers(2, 500), min_size=1, max_size=9))
def test_pairs_do_not_depend_on_how_a_prompt_is_cut(start: int, lengths: list[int]) -> None:
    """Each position reads those up to its own; the chunks of a prompt read together what one chunk reads."""
    chunks, end = [], start
    for length in lengths:
        chunks.append((end, length, False))
        end += length
    assert shape_of(chunks).prefill_pairs == shape_of([(start, end - start, False)]).prefill_pairs


@given(COSTS, st.integers(0, 100_000), st.floats(2, 10_000))
def test_chunk_within_is_the_inverse_of_chunk_seconds(cost: StepCost, start: int, length: float) -> None:
    seconds = cost.prefill * length + cost.pair * (2 * start + length) * length
    assert cost.chunk_within(seconds, start) == pytest.approx(length, rel=1e-6)


@given(COSTS, st.integers(0, 100_000), st.floats(-1, 0))
def test_no_chunk_fits_where_no_time_is_left(cost: StepCost, start: int, seconds: float) -> None:
    """Not even if prompts cost nothing, as a fit may say for a while."""
    assert cost.chunk_within(seconds, start) == 0
    assert replace(cost, prefill=0.0).chunk_within(seconds, start) == 0


@given(COSTS, st.integers(1, 64), st.integers(2, 4_000), st.integers(0, 9_000), st.floats(0.001, 1))
def test_what_is_left_beside_decodes_is_what_chunks_add_to_them(
    cost: StepCost, num_decodes: int, length: int, start: int, seconds: float
) -> None:
    decodes = [(500, 1, True)] * num_decodes
    left = cost.left_beside(shape_of(decodes), seconds)
    both = cost.seconds(shape_of([*decodes, (start, length, False)]))
    added = cost.chunk_seconds(start, length)
    assert (both - seconds) / cost.correction[2] == pytest.approx(added - left, rel=1e-6, abs=1e-9)


def test_the_knee_spends_the_share_that_was_asked_for() -> None:
    assert TRUE.step / (TRUE.step + TRUE.efficient_seconds(0.05)) == pytest.approx(0.05)


@given(st.lists(st.floats(0, 1), min_size=1), st.floats(0, 1))
def test_a_quantile_is_the_least_value_that_enough_do_not_exceed(values: list[float], q: float) -> None:
    def enough(limit: float) -> bool:
        return sum(value <= limit for value in values) >= q * len(values)

    found = quantile(values, q)
    assert enough(found)
    assert found == min(value for value in values if enough(value))


# -- least squares ------------------------------------------------------------------------------------------


def residual(rows: Sequence[Sequence[Fraction]], coefficients: Sequence[Fraction]) -> Fraction:
    misses = (sum((x * c for x, c in zip(row, coefficients, strict=True)), Fraction(-1)) for row in rows)
    return sum((miss * miss for miss in misses), Fraction(0))


def solve_exactly(system: list[list[Fraction]]) -> list[Fraction] | None:
    """Gauss and Jordan with fractions; None for a singular system. Each row ends with its right side."""
    for k in range(len(system)):
        pivot = next((i for i in range(k, len(system)) if system[i][k]), None)
        if pivot is None:
            return None
        system[k], system[pivot] = system[pivot], system[k]
        system[k] = [x / system[k][k] for x in system[k]]
        for i in range(len(system)):
            if i != k:
                system[i] = [x - system[i][k] * y for x, y in zip(system[i], system[k], strict=True)]
    return [row[-1] for row in system]


def least_residual(rows: Sequence[Sequence[Fraction]]) -> Fraction:
    """By trying every set of coefficients that may be other than 0."""
    size = len(rows[0])
    best = Fraction(len(rows))
    for free in itertools.chain.from_iterable(
        itertools.combinations(range(size), k + 1) for k in range(size)
    ):
        normal = [
            [sum(row[i] * row[j] for row in rows) for j in free]
            + [sum((row[i] for row in rows), Fraction(0))]
            for i in free
        ]
        found = solve_exactly(normal)
        if found is not None and min(found) >= 0:
            by_place = dict(zip(free, found, strict=True))
            best = min(best, residual(rows, [by_place.get(i, Fraction(0)) for i in range(size)]))
    return best


@pytest.mark.parametrize("kind", ["any rows", "true prices", "some of them 0"])
def test_the_solution_is_as_good_as_the_best_of_all_subsets(kind: str) -> None:
    draw = random.Random(kind)
    for _ in range(60):
        size = draw.choice([2, 3, 4])
        prices = [draw.uniform(0.1, 1) for _ in range(size)]
        if kind == "some of them 0":
            prices[1:] = [0.0 if draw.random() < 0.5 else price for price in prices[1:]]
        rows: list[list[Fraction]] = []
        while len(rows) < 10:
            row = [draw.randrange(6) for _ in range(size)]
            took = sum(x * y for x, y in zip(row, prices, strict=True)) * draw.lognormvariate(0, 0.05)
            scale = 1 if kind == "any rows" else Fraction(took).limit_denominator(1000)
            if scale:
                rows.append([x / Fraction(scale) for x in row])
        sums = [0.0] * (size * (size + 1))
        for exact in rows:
            new = sample_sums([float(x) for x in exact], 1.0)
            sums = [a + b for a, b in zip(sums, new, strict=True)]
        found = solve_nonnegative(sums, size)
        assert min(found) >= 0
        best = float(least_residual(rows))
        assert float(residual(rows, [Fraction(x) for x in found])) <= best * (1 + 1e-6) + 1e-6


def test_what_no_sample_has_shown_costs_nothing() -> None:
    assert solve_nonnegative([0.0] * 12, 3) == [0.0] * 3
    assert solve_nonnegative(sample_sums([2.0, 0.0], 1.0), 2) == pytest.approx([0.5, 0.0])


# -- learning -----------------------------------------------------------------------------------------------


def any_step(draw: random.Random) -> StepShape:
    """Of a mixed load: contexts short and long, chunks near the start and far into a text."""
    num_decodes, length = draw.choice([0, 1, 2, 4, 8, 12, 16]), draw.choice([0, 32, 64, 100, 200, 256, 512])
    chunk = (draw.choice([0, 0, 256, 1000, 3000, 7000]), length or 64, draw.random() < 0.3)
    context = draw.choice([50, 300, 1000, 4000])
    decodes = [(context + draw.randrange(50), 1, True) for _ in range(num_decodes)]
    return shape_of(decodes + [chunk] * (length > 0 or not num_decodes))


def decodes_alone(draw: random.Random) -> StepShape:
    return shape_of([(300 + draw.randrange(500), 1, True)] * STREAMS)


def decodes_beside_a_prompt(draw: random.Random) -> StepShape:
    chunk = (draw.randrange(4_000), draw.choice([96, 128, 160]), False)
    return shape_of([(300 + draw.randrange(500), 1, True)] * STREAMS + [chunk])


Load = Callable[[random.Random], StepShape]


def teach(
    model: CostModel, load: Load, num: int, draw: random.Random, *, slower: float = 1.0, outliers: float = 0.0
) -> None:
    for _ in range(num):
        shape = load(draw)
        disturbed = 3 if draw.random() < outliers else 1
        model.observe(shape, TRUE.seconds(shape) * slower * draw.lognormvariate(0, 0.03) * disturbed)


def errors(model: CostModel, shapes: Iterable[StepShape], *, slower: float = 1.0) -> list[float]:
    return [abs(model.cost.seconds(shape) / (slower * TRUE.seconds(shape)) - 1) for shape in shapes]


@pytest.mark.parametrize("seed", range(5))
def test_prices_are_found_under_noise_and_outliers(seed: int) -> None:
    """Every twentieth step takes three times as long. The shapes that are asked for were not seen."""
    draw, model = random.Random(seed), CostModel()
    teach(model, any_step, 500, draw, outliers=0.05)
    found = errors(model, [any_step(draw) for _ in range(300)])
    assert quantile(found, 0.5) < 0.05
    assert quantile(found, 0.9) < 0.15
    for name in ("decode", "prefill", "context", "pair"):
        assert getattr(model.cost, name) == pytest.approx(getattr(TRUE, name), rel=0.2), name
    assert model.cost.step + model.cost.head == pytest.approx(TRUE.step + TRUE.head, rel=0.1)
    assert model.error(0.5) < 0.05


@pytest.mark.parametrize("factor", [0.1, 10.0])
@pytest.mark.parametrize("load", [any_step, decodes_beside_a_prompt])
def test_one_step_that_is_far_off_hardly_moves_a_prediction(load: Load, factor: float) -> None:
    draw, model = random.Random(6), CostModel()
    teach(model, load, 300, draw)
    for _ in range(10):
        shape = load(draw)
        before = model.cost.seconds(shape)
        model.observe(shape, factor * before)
        assert model.cost.seconds(shape) == pytest.approx(before, rel=0.1)
        teach(model, load, 30, draw)


FAR = [
    shape_of([(9_000, 256, False)] + [(500, 1, True)] * STREAMS),
    shape_of([(7_000, 128, False)]),
    shape_of([(12_000, 512, True)] + [(4_000, 1, True)] * 16),
]
"""Steps far into a long text."""


def test_hours_of_steady_decodes_do_not_make_it_forget_long_contexts() -> None:
    draw, model = random.Random(1), CostModel()
    teach(model, any_step, 400, draw)
    before = [model.cost.seconds(shape) for shape in FAR]
    teach(model, decodes_alone, 10_000, draw)
    assert [model.cost.seconds(shape) for shape in FAR] == pytest.approx(before, rel=0.05)
    assert max(errors(model, FAR)) < 0.1


@pytest.mark.parametrize("load", [decodes_alone, decodes_beside_a_prompt])
def test_a_machine_that_becomes_slower_is_noticed_within_twenty_steps(load: Load) -> None:
    draw, model = random.Random(2), CostModel()
    teach(model, any_step, 400, draw)
    teach(model, load, 300, draw)
    teach(model, load, 20, draw, slower=1.5)
    assert max(errors(model, [load(draw) for _ in range(50)], slower=1.5)) < 0.12


def test_new_samples_take_the_place_of_old_ones_of_their_kind() -> None:
    """At another speed it is soon the prices that say so; the pace, which was sooner, is near 1 again."""
    draw, model = random.Random(7), CostModel()
    teach(model, decodes_alone, 1_000, draw)
    teach(model, decodes_alone, 100, draw, slower=1.5)
    assert max(errors(model, [decodes_alone(draw) for _ in range(50)], slower=1.5)) < 0.05
    assert model.cost.correction[0] == pytest.approx(1, abs=0.1)


def test_a_rare_kind_is_learned_though_the_usual_one_is_exact() -> None:
    """As in a simulation without noise: what is off by more than nothing is not for ever an outlier."""
    model, usual, rare = CostModel(), StepShape(8, 0, 4_000, 0, True), StepShape(0, 512, 0, 512 * 512, False)
    for step in range(400):
        shape = rare if step % 10 == 9 else usual
        model.observe(shape, TRUE.seconds(shape))
    assert max(errors(model, [usual, rare])) < 0.05


def test_the_same_calls_give_the_same_prices() -> None:
    first, second = CostModel(), CostModel()
    for model in (first, second):
        teach(model, any_step, 100, random.Random(3), outliers=0.05)
    assert first.cost == second.cost
    assert first.margin == second.margin


def size_of(model: CostModel) -> int:
    """Numbers that it keeps."""
    return sum(map(len, model._buckets.values())) + len(model._errors) + len(model._ratios)


def test_a_model_does_not_grow_with_the_steps() -> None:
    draw, model = random.Random(4), CostModel()
    teach(model, any_step, 1_500, draw)
    size = size_of(model)
    teach(model, any_step, 1_500, draw)
    assert size_of(model) < 1.1 * size


def test_the_margin_covers_mixed_steps_and_is_never_below_one() -> None:
    draw, model = random.Random(5), CostModel()
    teach(model, decodes_beside_a_prompt, 300, draw)
    assert 1.02 < model.margin < 1.12  # 95 % of steps with noise of 3 %: 1.05
    for _ in range(300):  # faster and faster
        shape = decodes_beside_a_prompt(draw)
        model.observe(shape, 0.9 * model.cost.seconds(shape))
    assert model.margin == 1.0


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_clock_that_stands_still_teaches_nothing(seconds: float) -> None:
    model = CostModel()
    before = model.cost
    model.observe(StepShape(1, 0, 10, 0, True), seconds)
    assert model.cost == before


@given(st.lists(st.tuples(st.integers(0, 2**32), st.floats(1e-6, 100)), max_size=30))
def test_no_history_makes_a_price_negative_or_a_prediction_nothing(steps: list[tuple[int, float]]) -> None:
    model = CostModel()
    for seed, seconds in steps:
        model.observe(any_step(random.Random(seed)), seconds)
        assert min(getattr(model.cost, name) for name in PRICES) >= 0
        assert model.cost.seconds(StepShape(1, 0, 1, 0, True)) > 0
        assert model.margin >= 1


def test_what_was_measured_before_is_judged_by_the_prices_that_came_of_it() -> None:
    """Not by the predictions on the way there, of which the first were those of the prior: far off here."""
    true = replace(TRUE, prefill=TRUE.prefill / 10, step=TRUE.step / 10, head=TRUE.head / 10)
    shapes = [StepShape(d, p, 500 * d, p * p, True) for d in (1, 8, 32) for p in (0, 64, 256, 512)]
    samples = [(shape, true.seconds(shape)) for shape in shapes * 3]
    model = CostModel(samples)
    assert model.error(0.9) < 0.1
    assert model.margin < 1.1
    ratios = sorted(seconds / PRIOR.seconds(shape) for shape, seconds in samples)
    one_by_one = CostModel(prior=PRIOR.times(ratios[(len(ratios) - 1) // 2]))
    for shape, seconds in samples:
        one_by_one.observe(shape, seconds)
    assert one_by_one.cost == model.cost
    assert one_by_one.error(1.0) > 2 * model.error(1.0)
