"""Norms, gates, sums and rotation: what PyTorch gives, within a few roundings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.models.projection import Norm, TorchOps


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def constant(ops, values, **around):
    """A layer whose product is `values` [out], whatever its input: no weights and a bias."""
    return ops.projection(torch.zeros(len(values), 32), values, **around)


def torch_ops():
    """PyTorch's, whose products are their inputs."""
    return TorchOps(lambda weight, bias: lambda x: x)  # noqa: ARG005


ROW = torch.zeros(1, 32)
sizes = st.integers(1, 60).map(lambda n: 16 * n)
seeds = st.integers(0, 2**32)
magnitudes = st.integers(-12, 12).map(lambda power: 10.0**power)


@given(sizes, seeds, magnitudes, st.sampled_from([1e-5, 1e-6]))
@settings(max_examples=60, deadline=None)
def test_a_norm_is_torchs_and_is_added(ops, size, seed, magnitude, eps):
    norm = Norm(1 + random(size, seed=seed), eps)
    values, residual = magnitude * random(size, seed=seed + 1), random(1, size, seed=seed + 2)
    expected, added = residual.clone(), torch.zeros(1, size)
    torch_ops().projection(ROW, after=norm).add_to(expected, values[None])
    layer = constant(ops, values, after=norm)
    layer.add_to(added, ROW)
    torch.testing.assert_close(added, norm(values[None]), rtol=1e-6, atol=1e-36)
    layer.add_to(residual, ROW)
    torch.testing.assert_close(residual, expected, rtol=1e-6, atol=1e-6)


@given(sizes, seeds, magnitudes)
@settings(max_examples=30, deadline=None)
def test_results_are_added_to_the_residual_stream(ops, size, seed, magnitude):
    values, residual = magnitude * random(size, seed=seed), random(1, size, seed=seed + 1)
    expected = residual + values
    constant(ops, values).add_to(residual, ROW)
    assert torch.equal(residual, expected)


@given(
    rows=st.integers(1, 40),
    heads=st.integers(1, 6),
    half=st.integers(1, 8).map(lambda n: 16 * n),
    has_norm=st.booleans(),
    seed=seeds,
    magnitude=magnitudes,
)
@settings(max_examples=60, deadline=None)
def test_heads_are_normalised_and_rotated_as_by_torch(ops, rows, heads, half, has_norm, seed, magnitude):
    qkv = magnitude * random(rows, heads + 2, 2 * half, seed=seed)
    angles = 100 * random(rows, half, seed=seed + 1)
    turn = angles.cos(), angles.sin()
    norm = Norm(1 + random(heads, 2 * half, seed=seed + 2), 1e-6) if has_norm else None
    expected = torch_ops().rope(qkv.clone(), heads, turn, norm)
    values = qkv[:, heads:].clone()
    y = ops.rope(qkv, heads, turn, norm)
    # Of a pair one may be small: its error is as large as the other's.
    pairs = expected.unflatten(2, (2, half)).norm(dim=2, keepdim=True)
    assert ((y - expected).unflatten(2, (2, half)).abs() <= 1e-6 * pairs).all()
    assert torch.equal(qkv[:, heads:], values), "values do not turn"


@given(st.integers(1, 30).map(lambda n: 32 * n), seeds, magnitudes)
@settings(max_examples=40, deadline=None)
def test_a_product_begins_with_the_norm_of_its_rows(ops, size, seed, magnitude):
    """The bits of the product of rows that were normalised before, as heads that do not turn."""
    x, weight = magnitude * random(7, size, seed=seed + 1), random(50, size, seed=seed + 2)
    gain = 1 + random(size, seed=seed)
    still = torch.ones(7, size // 2), torch.zeros(7, size // 2)
    normalised = ops.rope(x[:, None].clone(), 1, still, Norm(gain[None], 1e-6))[:, 0]
    expected = ops.projection(weight)(normalised)
    assert torch.equal(ops.projection(weight, before=Norm(gain, 1e-6))(x), expected)


SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 1e-3, -1e-3, 100.0, -100.0, 1e4, -1e4, 1e30, -1e30]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_is_torchs(ops, activation):
    """Of silu nearly all digits, as far as it is a normal float; of gelu those that 1 + tanh has.

    The exponent of e^x is rounded relatively to itself, so that a silu of nearly nothing has fewer digits.
    """
    gates = torch.cat((torch.tensor(SPECIAL), torch.linspace(-110, 110, 8000 - len(SPECIAL))))
    others = random(8000)
    values = torch.cat((gates, others))
    y = constant(ops, values, after=activation)(ROW)
    expected = torch_ops().projection(ROW, after=activation)(values[None])
    if activation == "silu":
        digits = 1e-6 * (gates.abs() / 16).clamp(min=1)
        assert ((y - expected).abs() <= digits * expected.abs() + 1e-34).all()
    else:
        assert ((y - expected).abs() <= 1e-6 * (gates * others).abs()).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_results_are_added_too(ops, activation):
    values, residual = random(128), random(1, 64, seed=1)
    expected = residual.clone()
    torch_ops().projection(ROW, after=activation).add_to(expected, values[None])
    constant(ops, values, after=activation).add_to(residual, ROW)
    torch.testing.assert_close(residual, expected, rtol=0, atol=1e-6)


def test_a_norm_after_is_also_that_of_what_is_not_added(ops):
    norm, values = Norm(1 + random(64), 1e-5), random(64, seed=1)
    torch.testing.assert_close(constant(ops, values, after=norm)(ROW), norm(values[None]), rtol=1e-6, atol=0)


def test_norms_before_and_after_have_their_own_eps(ops):
    gain, weight = torch.ones(64), random(64, 64)
    x, before, after = 1e-3 * random(5, 64, seed=1), Norm(gain, 1e-12), Norm(gain, 1.0)
    y = torch.zeros(5, 64)
    ops.projection(weight, before=before, after=after).add_to(y, x)
    expected = after(ops.projection(weight, before=before)(x))
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-9)
