"""A row's bits are its own, whatever is computed beside it; and nothing is written but what was asked for."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.kernels.product import NO_GATE, SILU, ProjectionArgs, Rows, matrix_of, packed_bytes, weights_bytes
from legato.models.projection import Norm

CANARY = 77


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True)
class Case:
    """A layer."""

    num_inputs: int
    num_outputs: int
    norm_before: bool = False
    after: str | None = None
    """A gate, or "norm"."""

    def build(self, ops):
        def norm(size):
            return Norm(1 + 0.2 * random(size), 1e-6)

        after = norm(self.num_outputs) if self.after == "norm" else self.after
        before = norm(self.num_inputs) if self.norm_before else None
        weight, bias = random(self.num_outputs, self.num_inputs), random(self.num_outputs, seed=1)
        return ops.projection(weight, bias, before=before, after=after)


CASES = [
    # Small: one thread prepares. With a part of a group, and of a panel.
    Case(80, 112),
    Case(96, 128, norm_before=True, after="silu"),
    Case(96, 128, after="gelu_tanh"),
    Case(80, 112, norm_before=True, after="norm"),
    # Large: threads share the preparing and the adding, and not all rows meet a panel at once.
    Case(1536, 48, norm_before=True),
    Case(1552, 64, after="norm"),
    # Huge: all rows together are written past the caches, a few are not.
    Case(32, 5264),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def layer_and_rows(request, ops):
    """A layer, 400 rows, and what it makes of them when one thread computes all at once."""
    case = request.param
    layer, x = case.build(ops), random(400, case.num_inputs, seed=2)
    x *= 10.0 ** random(400, 1, seed=3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = layer(x)
    residual = random(*whole.shape, seed=4)
    added = residual.clone()
    layer.add_to(added, x)
    torch.set_num_threads(threads)
    return layer, x, whole, residual, added


@given(
    rows=st.lists(st.integers(0, 399), min_size=1, max_size=60) | st.permutations(range(400)),
    threads=st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_no_bit_depends_on_number_order_neighbours_or_threads(layer_and_rows, rows, threads):
    layer, x, whole, residual, added = layer_and_rows
    torch.set_num_threads(threads)
    assert torch.equal(layer(x[rows]), whole[rows])
    sums = residual[rows]
    layer.add_to(sums, x[rows])
    assert torch.equal(sums, added[rows])


def test_every_size_of_tile_gives_the_same_bits(ops):
    layer, x = CASES[0].build(ops), random(30, 80)
    alone = torch.cat([layer(row[None]) for row in x])
    for count in range(1, 31):
        assert torch.equal(layer(x[:count]), alone[:count])


def test_a_head_has_the_bits_of_a_projection_and_uses_its_memory_again(ops):
    weight, norm, x = random(1000, 64), Norm(random(64, seed=1), 1e-6), random(7, 64, seed=2)
    head, layer = ops.head(weight, norm), ops.projection(weight, before=norm)
    first = head(x)
    assert torch.equal(first, layer(x))
    second = head(x[:3] + 1)
    assert torch.equal(second, layer(x[:3] + 1))
    assert second.data_ptr() == first.data_ptr()


def test_rows_may_lie_apart(ops):
    """As a slice of wider rows, for inputs and for the residual stream."""
    layer, wide = CASES[0].build(ops), random(9, 300)
    x = wide[::2, 100:180]
    assert torch.equal(layer(x), layer(x.contiguous()))
    to, expected = torch.zeros(5, 200), torch.zeros(5, 112)
    layer.add_to(to[:, 60:172], x)
    layer.add_to(expected, x)
    assert torch.equal(to[:, 60:172], expected)
    assert not to[:, :60].any()
    assert not to[:, 172:].any()


@given(
    rows=st.integers(1, 1000),
    heads=st.integers(1, 4),
    has_norm=st.booleans(),
    seed=st.integers(0, 999),
    threads=st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_a_rotated_row_depends_on_nothing_else(ops, rows, heads, has_norm, seed, threads):
    qkv, angles = random(1000, 5, 32, seed=seed), random(1000, 16, seed=seed + 1)
    norm = Norm(random(heads, 32, seed=seed + 2), 1e-6) if has_norm else None
    turn = angles.cos(), angles.sin()
    torch.set_num_threads(1)
    whole = ops.rope(qkv.clone(), heads, turn, norm)
    torch.set_num_threads(threads)
    first = (seed * 7) % (1001 - rows)
    some = slice(first, first + rows)
    assert torch.equal(ops.rope(qkv[some].clone(), heads, (turn[0][some], turn[1][some]), norm), whole[some])


class Guarded:
    """Memory with a canary on both sides, of any number of bytes."""

    def __init__(self, size):
        memory = np.full(size + 576, CANARY, np.uint8)
        self._bytes = memory[-memory.ctypes.data % 64 :][: size + 512]
        self.inside = self._bytes[256 : 256 + size]
        self.address = self.inside.ctypes.data
        """A multiple of 64."""

    @classmethod
    def of(cls, array):
        guarded = cls(array.nbytes)
        guarded.inside[:] = array.reshape(-1).view(np.uint8)
        return guarded

    @property
    def alive(self):
        return bool((self._bytes[:256] == CANARY).all() and (self._bytes[-256:] == CANARY).all())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 5, 29])
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "gate", "adds", "has_norms"),
    [
        (16, 16, NO_GATE, True, True),
        (656, 48, NO_GATE, True, False),
        (640, 50, NO_GATE, False, False),
        (144, 1, NO_GATE, False, True),
        (144, 128, SILU, False, True),
        (144, 128, SILU, True, False),
    ],
)
def test_nothing_is_written_beyond_the_matrix_its_rows_and_their_memory(
    ops, num_inputs, num_outputs, gate, adds, has_norms, num_rows, threads
):
    """Rows of `out` and `residual` are apart from each other, too."""
    torch.set_num_threads(threads)
    form, width = ops.format, num_outputs // 2 if gate else num_outputs
    weights = Guarded(weights_bytes(form, num_inputs, num_outputs))
    packed = Guarded(packed_bytes(form, num_rows, num_inputs))
    x = Guarded.of(random(num_rows, num_inputs).numpy())
    weight = Guarded.of(random(num_outputs, num_inputs).numpy())
    gain, after_gain = (Guarded.of(np.ones(size, np.float32)) for size in (num_inputs, width))
    bias = Guarded.of(np.zeros(-(-num_outputs // form.panel) * form.panel, np.float32))
    stride = 4 * width + 64
    blank = np.full((num_rows, stride), CANARY, np.uint8)
    blank[:, : 4 * width] = 0
    out, residual = Guarded.of(blank), Guarded.of(blank)
    matrix = matrix_of(form, num_inputs, num_outputs, weights.address, bias.address)
    ops.pack(ops.threads, matrix, Rows(weight.address, 4 * num_inputs), 0, num_outputs)
    args = ProjectionArgs(
        num_rows=num_rows,
        gain=gain.address if has_norms else 0,
        eps=1e-6,
        gate=gate,
        streams=stride % 64 == 0,
        adds=adds,
        after_gain=after_gain.address if has_norms else 0,
        after_eps=1e-6,
        packed=packed.address,
    )
    to = Rows(residual.address, stride)
    ops.project(ops.threads, matrix, args, Rows(x.address, 4 * num_inputs), Rows(out.address, stride), to)
    assert all(memory.alive for memory in (weights, packed, x, weight, gain, after_gain, bias, out, residual))
    for memory, is_written in ((out, True), (residual, adds)):
        rows = memory.inside.reshape(num_rows, stride)
        assert (rows[:, 4 * width :] == CANARY).all()
        assert (rows[:, : 4 * width].any(1) == is_written).all()
