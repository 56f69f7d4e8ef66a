"""Packed linear layers: right numbers, and the same bits for a row whatever stands beside it."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from legato.models.linear_fp16 import PACK_ROWS, Fp16Linear, obstacle, row_tile

SHAPES = [(640, 640), (1000, 2048), (48, 16), (7, 640)]


def case(num_out: int, num_in: int, num_rows: int = 90) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight, bias and rows; some rows are large, some have one large value, one is zero."""
    generator = torch.Generator().manual_seed(num_out * 10_007 + num_in)
    weight = torch.randn(num_out, num_in, generator=generator) * 0.02
    x = torch.randn(num_rows, num_in, generator=generator)
    x[::3] *= 100
    x[1::4, 5] *= 50
    x[2] = 0
    return weight, torch.randn(num_out, generator=generator), x


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_right(shape: tuple[int, int]) -> None:
    weight, bias, x = case(*shape)
    exact = F.linear(x.double(), weight.double(), bias.double())
    size = x.norm(dim=1, keepdim=True) * weight.norm(dim=1) + bias.abs()
    error = (Fp16Linear(weight, bias)(x) - exact).abs() / size
    assert float(error.max()) < 5e-4


def test_no_bias_is_a_bias_of_zero() -> None:
    weight, _, x = case(64, 32)
    assert torch.equal(Fp16Linear(weight, None)(x), Fp16Linear(weight, torch.zeros(64))(x))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int]) -> None:
    weight, bias, x = case(*shape)
    layer = Fp16Linear(weight, bias)
    whole = layer(x)
    for num_rows in range(1, len(x) + 1):
        assert torch.equal(layer(x[:num_rows]), whole[:num_rows]), num_rows
    for i in range(0, len(x), 7):
        assert torch.equal(layer(x[i : i + 1]), whole[i : i + 1])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_order_and_neighbours_do_not_matter(data: st.DataObject) -> None:
    weight, bias, x = case(320, 96)
    layer = Fp16Linear(weight, bias)
    rows = data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=70))
    assert torch.equal(layer(x[rows]), layer(x)[rows])


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_does_not_matter() -> None:
    weight, bias, x = case(1000, 640)
    layer = Fp16Linear(weight, bias)
    torch.set_num_threads(1)
    one = layer(x)
    torch.set_num_threads(2)
    assert torch.equal(layer(x), one)


def test_a_matrix_packed_in_parts_is_one_matrix() -> None:
    weight, bias, x = case(PACK_ROWS + 5, 16, num_rows=3)
    exact = F.linear(x, weight, bias)
    assert torch.allclose(Fp16Linear(weight, bias)(x), exact, rtol=1e-2, atol=1e-2)


def test_an_operator_that_is_gone_is_an_obstacle_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert obstacle() is None
    monkeypatch.setattr(torch.ops, "quantized", object())
    row_tile.cache_clear()
    found = obstacle()
    assert found is not None
    assert found.startswith("AttributeError: ")


def test_a_wrong_product_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.ops.quantized.linear_dynamic_fp16
    wrong = SimpleNamespace(
        linear_prepack_fp16=torch.ops.quantized.linear_prepack_fp16,
        linear_dynamic_fp16=lambda x, packed: right(x, packed) + 1,
    )
    monkeypatch.setattr(torch.ops, "quantized", wrong)
    assert obstacle() == "a test product came out wrong"
