"""Layers for CPUs over compiled integer products: a row's bits never depend on its batch, by arithmetic.

`w16` keeps 12 bits of each weight and 14 of each input, with one scale for every 128 of them; `w8` keeps 8
and 8, with one for every 32. See `kernels/product_vector.py` for why their sums are exact. Knows tensors, and
no arithmetic.

Shape legend: see `projection.py`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from legato.errors import ConfigError, ModelError
from legato.kernels.cache import preparing
from legato.kernels.product import (
    FORMATS,
    GELU_TANH,
    NO_GATE,
    SILU,
    Matrix,
    ProjectionArgs,
    Rows,
    matrix_of,
    pack_kernel,
    packed_bytes,
    project_kernel,
    read_kernel,
    weights_bytes,
)
from legato.kernels.rope import Heads, rope_kernel
from legato.kernels.thread_pool import PoolHandle, ThreadPool
from legato.kernels.vector import LANES, fuses_multiply_add
from legato.models.projection import After, Lookup, Norm, Projection
from legato.models.spec import Activation, ModelSpec

_GATES: dict[Activation, int] = {"silu": SILU, "gelu_tanh": GELU_TANH}
_PACK_ROWS = 16_384
"""Rows of a matrix that are floats at the same time while it is packed."""
_HUGE = 1 << 23
"""Bytes of results that the caches do not hold until they are used."""
_NOWHERE = Rows(0, 0)


def obstacle(spec: ModelSpec) -> str | None:
    """Why these layers do not work for a model on this machine, in words; None if they do."""
    if not fuses_multiply_add():
        return "this processor has no fused multiply-add"
    sizes = {
        "hidden size": (spec.hidden_size, LANES),
        "MLP size": (spec.intermediate_size, FORMATS["w16"].panel),
        "head size": (spec.head_dim, 2 * LANES),
    }
    for name, (size, unit) in sizes.items():
        if size % unit:
            return f"{name} {size} is not a multiple of {unit}"
    return None


def is_fast() -> bool:
    """Whether there is an instruction for what the kernels do most."""
    return FORMATS["w16"].instruction != "plain"


def packed_weight_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Memory of a packed matrix [out, in]."""
    num_outputs, num_inputs = shape
    return weights_bytes(FORMATS[kind], num_inputs, num_outputs)


class CpuOps:
    """Layers of one model. Its memory for a step is shared by all of them: one step at a time."""

    def __init__(
        self,
        kind: str,
        threads: ThreadPool | None = None,
        *,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`kind`: "w16" or "w8". Compiles, which takes seconds, or loads what an earlier start compiled.

        `threads`: as many as torch has if not told. Raises ConfigError on a machine without fused
        multiply-add.
        """
        if not fuses_multiply_add():
            raise ConfigError("weights: this processor has no fused multiply-add", param="weights")
        self.format = FORMATS[kind]
        self._pool = threads or ThreadPool(torch.get_num_threads())
        self._memory: dict[str, Tensor] = {}
        with preparing("linear", progress):
            self.project, self.pack, self.read, self._rope = kernels = [
                make() for make in (project_kernel, pack_kernel, read_kernel, rope_kernel)
            ]
            self._try_out()
        for kernel in kernels:
            kernel.close()

    @property
    def threads(self) -> PoolHandle:
        """The threads for the next call. Wakes them if they sleep."""
        return self._pool.handle(torch.get_num_threads())

    def memory(self, use: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that is this use's until it asks again: new memory costs a page fault every 4 KiB."""
        size = math.prod(shape)
        held = self._memory.get(use)
        if held is None or len(held) < size:
            held = self._memory[use] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)

    def projection(
        self, weight: Tensor, bias: Tensor | None = None, *, before: Norm | None = None, after: After = None
    ) -> "CpuProjection":
        return CpuProjection(self, weight, bias, before, after)

    def head(self, weight: Tensor, before: Norm) -> "CpuProjection":
        return CpuProjection(self, weight, None, before, None, memory="logits")

    def embedding(self, weight: Tensor, scale: float, head: Projection | None) -> Lookup:
        if isinstance(head, CpuProjection):
            return lambda ids: head.rows(ids, scale)
        kept = weight.half()
        return lambda ids: torch.nn.functional.embedding(ids, kept).float() * scale

    def rope(self, qkv: Tensor, num: int, angles: tuple[Tensor, Tensor], norm: Norm | None) -> Tensor:
        """In place."""
        cos, sin = (tensor.contiguous() for tensor in angles)
        heads = Heads(
            address=qkv.data_ptr(),
            row=qkv.stride(0) * 4,
            num_rows=len(qkv),
            num_heads=num,
            dim=qkv.shape[2],
            gains=0 if norm is None else norm.gain.data_ptr(),
            eps=0.0 if norm is None else norm.eps,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
        )
        self._rope(self.threads, heads)
        return qkv[:, :num]

    def _try_out(self) -> None:
        layer = self.projection(torch.ones(2, 2 * LANES))
        layer(torch.ones(1, 2 * LANES))
        layer.rows(torch.zeros(1, dtype=torch.int64), 1.0)
        angles = torch.zeros(1, LANES)
        self.rope(torch.zeros(1, 1, 2 * LANES), 1, (angles, angles), None)


class CpuProjection:
    """A packed matrix, and what comes before and after it."""

    def __init__(
        self,
        ops: CpuOps,
        weight: Tensor,
        bias: Tensor | None,
        before: Norm | None,
        after: After,
        *,
        memory: str | None = None,
    ) -> None:
        """`weight` [out, in] of any float type; it is not kept. Raises ModelError if a weight is too large.

        `memory`: where each call puts its results, over those of the call before; else in new memory.
        """
        self._ops = ops
        self._memory = memory
        self._before = before
        self._norm = after if isinstance(after, Norm) else None
        self._gate = NO_GATE
        fmt = ops.format
        if isinstance(after, str):
            self._gate = _GATES[after]
            weight = _in_turns(weight, fmt.panel)
            bias = None if bias is None else _in_turns(bias, fmt.panel)
        num_outputs, num_inputs = weight.shape
        self._width = num_outputs // 2 if self._gate else num_outputs
        self._packed = torch.empty(weights_bytes(fmt, num_inputs, num_outputs), dtype=torch.uint8)
        self._bias = torch.zeros(-(-num_outputs // fmt.panel) * fmt.panel)
        if bias is not None:
            self._bias[: len(bias)] = bias
        self._matrix: Matrix = matrix_of(
            fmt, num_inputs, num_outputs, self._packed.data_ptr(), self._bias.data_ptr()
        )
        for first in range(0, num_outputs, _PACK_ROWS):
            part = weight[first : first + _PACK_ROWS].float().contiguous()
            if not (largest := float(part.abs().amax())) < fmt.weight_limit:
                raise ModelError(
                    f"weights: a matrix holds {largest:.4g}; integers take less than {fmt.weight_limit:.0f} "
                    "(--weights dense takes more)"
                )
            ops.pack(ops.threads, self._matrix, _rows(part), first, len(part))

    def __call__(self, x: Tensor) -> Tensor:  # [T, in] fp32 -> [T, out] fp32
        shape = len(x), self._width
        out = torch.empty(shape) if self._memory is None else self._ops.memory(self._memory, shape)
        self._project(x, out, None)
        return out if self._norm is None else self._norm(out)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        self._project(x, self._ops.memory("results", (len(x), self._width)), residual)

    def rows(self, numbers: Tensor, factor: float) -> Tensor:
        """Rows of the matrix [in] by their numbers [T] int64, as they are computed with, times a factor.

        Raises IndexError for a row that there is not: compiled code would read what lies there.
        """
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self._matrix.num_outputs:
            raise IndexError(f"rows run from 0 to {self._matrix.num_outputs - 1}")
        out = torch.empty(len(numbers), self._matrix.num_inputs)
        self._ops.read(self._ops.threads, self._matrix, numbers.numpy(), _rows(out), factor)
        return out

    def _project(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        ops, before, after = self._ops, self._before, self._norm
        assert x.dtype == torch.float32, "compiled code reads floats"
        assert x.shape[1] == self._matrix.num_inputs
        assert x.stride(1) == 1, "side by side"
        size = packed_bytes(ops.format, len(x), self._matrix.num_inputs)
        args = ProjectionArgs(
            num_rows=len(x),
            gain=0 if before is None else before.gain.data_ptr(),
            eps=0.0 if before is None else before.eps,
            gate=self._gate,
            streams=_is_huge(out),
            adds=residual is not None,
            after_gain=0 if after is None else after.gain.data_ptr(),
            after_eps=0.0 if after is None else after.eps,
            packed=ops.memory("packed", (size,), torch.uint8).data_ptr(),
        )
        to = _NOWHERE if residual is None else _rows(residual)
        ops.project(ops.threads, self._matrix, args, _rows(x), _rows(out), to)


def _in_turns(rows: Tensor, panel: int) -> Tensor:
    """A gate's rows, the gates first, as a panel of gates, a panel of the others, and so on."""
    halves = rows.view(2, -1, panel, *rows.shape[1:])
    return halves.transpose(0, 1).reshape(rows.shape)


def _is_huge(out: Tensor) -> bool:
    """Whether results are too many for the caches, and lie as those who write past them need it."""
    return out.nbytes >= _HUGE and out.data_ptr() % 64 == 0 and out.stride(0) * 4 % 64 == 0


def _rows(tensor: Tensor) -> Rows:
    """[rows, elements] fp32 with elements side by side."""
    return Rows(tensor.data_ptr(), tensor.stride(0) * 4)
