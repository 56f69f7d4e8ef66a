"""Integer products: the bits that numpy's integers give, by whatever instruction."""

import math
from fractions import Fraction

import gguf
import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integer_oracle import ORACLES, fma

from legato.errors import ModelError
from legato.kernels import product_vector
from legato.kernels.product_vector import instructions, multiplier, row_packer, weight_packer

LARGEST_WEIGHT = 7e3
"""A bit less than what w8 can hold: its scales are float16, and a weight is at most 127 / 1024 of them."""
INSTRUCTIONS = [
    (kind, instruction)
    for kind in ("w16", "w8")
    for instruction in instructions()
    if kind == "w8" or not instruction.startswith("quads")
]


def same_bits(a, b):
    return torch.equal(torch.as_tensor(a).view(torch.int32), torch.as_tensor(b).view(torch.int32))


def numbers(shape, seed, largest=1e30):
    """Floats [rows, columns] of many sizes; some rows are zeros, some elements are easily got wrong."""
    draw = np.random.default_rng(seed)
    sizes = 10.0 ** draw.uniform(-3, 3, (shape[0], 1)) * 10.0 ** draw.uniform(-2, 0, (1, shape[1]))
    x = (draw.standard_normal(shape) * sizes).astype(np.float32)
    for value in (0.0, -0.0, 1e-8, -1e-20, 1e-36, 1e-42, largest, -largest):
        rows = draw.random((shape[0], 1)) < 0.1
        x[rows & (draw.random(shape) < 0.02)] = value
    for row in np.flatnonzero(draw.random(len(x)) < 0.1):  # halves round to even, if the scale is 1
        x[row] = draw.integers(-127, 127, shape[1]) + 0.5
        x[row, ::16] = draw.choice([127, 2047, 8191])
    x[draw.random(len(x)) < 0.1] = draw.choice([0.0, -0.0], shape[1])
    return torch.from_numpy(x.clip(-largest, largest))


def signs(num_rows, num_inputs):
    """Rows of 1 and -1 that differ in every way that a sum could notice; the first are all of one sign."""
    draw = np.random.default_rng(0)
    x = draw.choice([-1.0, 1.0], (num_rows, num_inputs)).astype(np.float32)
    x[0], x[1] = 1, -1
    x[2, ::2], x[2, 1::2] = 1, -1
    x[3] = -x[2]
    x[4, : num_inputs // 2], x[4, num_inputs // 2 :] = 1, -1
    return torch.from_numpy(x)


@given(
    num_rows=st.integers(1, 30),
    num_inputs=st.integers(1, 26).map(lambda n: 16 * n),
    num_outputs=st.integers(1, 100),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_a_product_has_the_bits_of_the_oracle(ops, kind, num_rows, num_inputs, num_outputs, has_bias, seed):
    x = numbers((num_rows, num_inputs), seed)
    weight = numbers((num_outputs, num_inputs), seed + 1, LARGEST_WEIGHT)
    bias = numbers((1, num_outputs), seed + 2)[0] if has_bias else None
    start = np.zeros(num_outputs, np.float32) if bias is None else bias.numpy()
    expected = ORACLES[kind].product(x.numpy(), weight.numpy(), start)
    assert same_bits(ops.projection(weight, bias)(x), expected)


@pytest.mark.parametrize("shape", [(640, 640), (1000, 2048), (48, 16), (7, 640)])
def test_a_product_is_right(ops, kind, shape):
    """As near to exact numbers as rows and weights of so many bits can be."""
    generator = torch.Generator().manual_seed(shape[0])
    weight, x = 0.02 * torch.randn(shape, generator=generator), torch.randn(90, shape[1], generator=generator)
    x[::3] *= 100
    x[1::4, 5] *= 50
    x[2] = 0
    bias = torch.randn(shape[0], generator=generator)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    size = x.norm(dim=1, keepdim=True) * weight.norm(dim=1) + bias.abs()
    error = (ops.projection(weight, bias)(x) - exact).abs() / size
    assert error.max() < {"w16": 4e-4, "w8": 1e-2}[kind]


def test_the_oracle_rounds_a_product_plus_a_number_once():
    """Against exact fractions. The last two would round to the same float if they went through a float64."""
    draw = np.random.default_rng(1)
    a, b, c = (draw.standard_normal(1000) * 10.0 ** draw.integers(-6, 7, 1000) for _ in range(3))
    a[-2:] = b[-2:] = 1 + 2.0**-12
    c[-2:] = 2.0**-60, -(2.0**-60)
    a, b, c = (x.astype(np.float32) for x in (a, b, c))
    results = fma(a, b, c)
    assert results[-1] < results[-2]
    for x, y, z, got in zip(a, b, c, results, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        others = [np.nextafter(got, np.float32(way * np.inf)) for way in (-1, 1)]
        distance = abs(Fraction(float(got)) - exact)
        assert all(distance <= abs(Fraction(float(other)) - exact) for other in others)


def test_the_largest_integers_of_every_sign_add_up_without_overflow(ops, kind):
    """All weights and inputs are the largest integer or its opposite, over whole groups and a part of one."""
    weight, x = signs(50, 400) * 0.75, signs(30, 400) * 3.0
    oracle = ORACLES[kind]
    weights, inputs = oracle.pack_weights(weight.numpy())[0], oracle.pack_inputs(x.numpy())[0]
    assert (np.abs(weights[:, 0]) == oracle.weight_max).all()
    assert (np.abs(inputs[:, 0]) == oracle.input_max).all()
    bias = np.zeros(50, np.float32)
    y = ops.projection(weight)(x)
    assert same_bits(y, oracle.product(x.numpy(), weight.numpy(), bias))
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_spoils_itself_only(ops, value):
    weight, x = numbers((70, 208), 1, LARGEST_WEIGHT), numbers((29, 208), 2)
    layer, spoilt = ops.projection(weight), [0, 7, 20, 21, 28]
    clean = layer(x)
    x[spoilt, 100] = value
    y = layer(x)
    fine = [row for row in range(29) if row not in spoilt]
    assert same_bits(y[fine], clean[fine])
    weighed = (weight[:, 96:128] != 0).any(1)
    assert not y[spoilt][:, weighed].isfinite().any()


@pytest.mark.parametrize("num_inputs", [16, 96, 128, 656])
@pytest.mark.parametrize("num_outputs", [1, 31, 33, 200])
def test_rows_are_read_as_they_are_computed_with(ops, kind, num_inputs, num_outputs):
    weight = numbers((num_outputs, num_inputs), num_inputs + num_outputs, LARGEST_WEIGHT)
    kept = torch.from_numpy(ORACLES[kind].weights_as_kept(weight.numpy()))
    layer = ops.projection(weight)
    ids = torch.tensor([num_outputs - 1, 0, num_outputs // 2, 0])
    assert same_bits(layer.rows(ids, 1.0) + 0.0, kept[ids] + 0.0)
    assert same_bits(layer.rows(ids, 25.3) + 0.0, kept[ids] * torch.tensor(25.3) + 0.0)
    half_a_step = weight.abs().amax(1, keepdim=True) / (2 * ORACLES[kind].weight_max)
    assert ((kept - weight).abs() <= 1.002 * half_a_step + 1e-10).all()


@pytest.mark.parametrize("number", [50, -1, 1 << 40])
def test_a_row_that_there_is_not_is_an_error_and_no_read_of_other_memory(ops, number):
    layer = ops.projection(numbers((50, 64), 1, LARGEST_WEIGHT))
    with pytest.raises(IndexError, match="rows run from 0 to 49"):
        layer.rows(torch.tensor([0, number]), 1.0)


@pytest.mark.parametrize("kind", ["w8"], scope="session")
def test_the_weights_of_a_file_in_q8_0_stay_as_they_are(ops):
    """From scales that are hardly a float16 up to the largest that fit."""
    draw = np.random.default_rng(5)
    sizes = 10.0 ** draw.uniform(-9, 3.3, (70, 1))
    weight = (draw.standard_normal((70, 416)) * sizes).astype(np.float32)
    weight[3, 32:64] = 0
    blocks = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    published = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    assert (published != 0).any(1).sum() > 40
    rows = ops.projection(published).rows(torch.arange(70), 1.0)
    assert same_bits(rows + 0.0, published + 0.0)


def compiled(form):
    """A function that packs weights, then rows tile by tile, and multiplies them, each by that format."""
    pack_row, pack_weights, multiply = row_packer(form), weight_packer(form), multiplier(form)

    @numba.njit
    def pack(weight, packed, num_groups, group_bytes, size):
        for output in range(len(weight)):
            for i in range(num_groups):
                source = np.int64(weight[output].ctypes.data) + i * size
                pack_weights(np.int64(packed.ctypes.data) + i * group_bytes, output, source)

    @numba.njit
    def run(x, sums, packed, weights, num_groups, group_bytes, size):
        for row in range(len(x)):
            for i in range(num_groups):
                to = np.int64(packed.ctypes.data) + i * len(x) * group_bytes
                pack_row(to, row, len(x), np.int64(x[row].ctypes.data) + i * size)
        multiply(len(x), sums.ctypes.data, packed.ctypes.data, weights.ctypes.data, num_groups)

    def product(x, weight):
        num_groups = x.shape[1] // form.group
        weights = np.zeros(num_groups * form.weight_group, np.uint8)
        pack(weight, weights, num_groups, form.weight_group, form.group * 4)
        outputs, first = [], 0
        while first < len(x):
            tile = x[first : first + next(size for size in form.tiles if size <= len(x) - first)]
            sums = np.zeros((len(tile), form.panel), np.float32)
            packed = np.zeros(len(tile) * num_groups * form.row_group, np.uint8)
            run(tile, sums, packed, weights, num_groups, form.row_group, form.group * 4)
            outputs.append(sums)
            first += len(tile)
        return np.concatenate(outputs)

    return product


@pytest.mark.parametrize(("kind", "instruction"), INSTRUCTIONS, scope="session")
def test_every_instruction_gives_the_bits_of_the_oracle(kind, instruction):
    form = getattr(product_vector, kind)(instruction)
    product = compiled(form)
    num_inputs = 3 * math.lcm(form.group, 128)
    for x, weight in (
        (numbers((27, num_inputs), 3), numbers((form.panel, num_inputs), 4, LARGEST_WEIGHT)),
        (signs(27, num_inputs), signs(form.panel, num_inputs)),
    ):
        expected = ORACLES[kind].product(x.numpy(), weight.numpy(), np.zeros(form.panel, np.float32))
        assert same_bits(product(x.numpy(), weight.numpy()), expected)


def test_there_is_an_instruction_for_every_machine():
    assert instructions()[-1] == "plain"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2e6])
def test_a_weight_that_no_scale_can_hold_is_refused_with_the_limit(ops, value):
    weight = torch.ones(40, 32)
    weight[37, 3] = value
    with pytest.raises(ModelError, match=f"integers take less than {ops.format.weight_limit:.0f}"):
        ops.projection(weight)
