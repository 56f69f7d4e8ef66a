"""What a step costs beside its linear layers and its attention.

    python -m benchmarks.step --json

One row for each shape of a step: decodes at some context, chunks of a prompt alone and beside decodes.
`linears_ms` and `attention_ms` are the times inside those calls, measured in the same steps; `ratio` is
step_ms / (linears_ms + attention_ms), so 1.10 means that everything else takes a tenth.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from legato.attention.base import AttentionBackend, AttentionBatch, AttentionParams, LayerCache
from legato.attention.cpu import CpuAttention
from legato.config import ModelSettings
from legato.core.request import RequestId
from legato.core.step_plan import ForwardBatch, ForwardSeq, SampleRow, StepPlan
from legato.models.decoder import Decoder
from legato.models.load import open_model
from legato.models.projection import After, LayerOps, Lookup, Norm, Projection
from legato.models.source import resolve
from legato.runner.backends import WEIGHTS, layer_ops
from legato.runner.kv_cache import KVCache
from legato.runner.runner import TorchRunner
from legato.sampling_params import SamplingParams

T = TypeVar("T")
BLOCK = 32
PROMPT_START = 512
"""How much of its prompt a chunk finds computed."""


class Stopwatch:
    """Adds up the time spent in what it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, run: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = run()
        self.seconds += time.perf_counter() - began
        return result


class TimedProjection:
    """A projection on a stopwatch."""

    def __init__(self, inner: Projection, watch: Stopwatch) -> None:
        self._inner = inner
        self._watch = watch

    def __call__(self, x: Tensor) -> Tensor:
        return self._watch.time(lambda: self._inner(x))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        self._watch.time(lambda: self._inner.add_to(residual, x))


class TimedOps:
    """Layers whose projections are on a stopwatch."""

    def __init__(self, inner: LayerOps, watch: Stopwatch) -> None:
        self._inner = inner
        self._watch = watch
        self.rope = inner.rope

    def projection(
        self, weight: Tensor, bias: Tensor | None = None, *, before: Norm | None = None, after: After = None
    ) -> Projection:
        return TimedProjection(self._inner.projection(weight, bias, before=before, after=after), self._watch)

    def head(self, weight: Tensor, before: Norm) -> Projection:
        return TimedProjection(self._inner.head(weight, before), self._watch)

    def embedding(self, weight: Tensor, scale: float, head: Projection | None) -> Lookup:
        return self._inner.embedding(
            weight, scale, head._inner if isinstance(head, TimedProjection) else head
        )


class TimedAttention:
    """An attention back end on a stopwatch."""

    def __init__(self, inner: AttentionBackend, watch: Stopwatch) -> None:
        self.name = inner.name
        self._inner = inner
        self._watch = watch

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> Tensor:
        return self._watch.time(lambda: self._inner(q, k, v, cache, batch, params))


@dataclass(frozen=True, slots=True)
class Shape:
    """A step: so many decodes at a context, and a chunk."""

    decodes: int
    context: int
    chunk: int

    def plan(self) -> StepPlan:
        width = -(-(max(self.context, PROMPT_START + self.chunk) + 1) // BLOCK)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        seqs = []
        for i in range(self.decodes):
            seqs.append(ForwardSeq(RequestId(f"d{i}"), (100 + i,), self.context, self._blocks(i, width)))
        if self.chunk:
            tokens = tuple(1000 + i for i in range(self.chunk))
            seqs.append(ForwardSeq(RequestId("p"), tokens, PROMPT_START, self._blocks(self.decodes, width)))
        rows = [SampleRow(i, seq.request_id, params, 0) for i, seq in enumerate(seqs)]
        return StepPlan(ForwardBatch(tuple(seqs)), tuple(rows))

    @staticmethod
    def _blocks(number: int, width: int) -> tuple[int, ...]:
        return tuple(range(number * width, (number + 1) * width))


SHAPES = (
    *(Shape(rows, context, 0) for context in (512, 2048) for rows in (1, 4, 16)),
    *(Shape(decodes, 512, chunk) for decodes in (0, 8) for chunk in (64, 256, 512)),
)


def median_ms(run: Callable[[], list[float]], seconds: float) -> list[float]:
    """Medians of what `run` measures, over `seconds` and at least five times."""
    run()
    samples: list[list[float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 5:
        samples.append(run())
    return [1000 * statistics.median(column) for column in zip(*samples, strict=True)]


def measure(model: str, weights: str, cache_dir: Path, seconds: float) -> list[dict[str, object]]:
    opened = open_model(resolve(model, cache_dir=cache_dir))
    cpu = torch.device("cpu")
    linears, attention = Stopwatch(), Stopwatch()
    decoder = Decoder(
        opened.spec,
        opened.weights(dtype=torch.float32, device=cpu),
        attention=TimedAttention(CpuAttention(head_dim=opened.spec.head_dim), attention),
        ops=TimedOps(layer_ops(weights), linears),
    )
    cache = KVCache(opened.spec, num_blocks=16 * 66, block_size=BLOCK, dtype=torch.float32, device=cpu)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    runner = TorchRunner(decoder, cache)
    rows: list[dict[str, object]] = []
    for shape in SHAPES:
        plan = shape.plan()

        def run(plan: StepPlan = plan) -> list[float]:
            linears.seconds = attention.seconds = 0.0
            elapsed = runner.run(plan).elapsed
            return [elapsed, linears.seconds, attention.seconds]

        step_ms, linears_ms, attention_ms = median_ms(run, seconds)
        rows.append(
            {
                "decodes": shape.decodes,
                "context": shape.context,
                "chunk": shape.chunk,
                "step_ms": round(step_ms, 2),
                "linears_ms": round(linears_ms, 2),
                "attention_ms": round(attention_ms, 2),
                "ratio": round(step_ms / (linears_ms + attention_ms), 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=ModelSettings().model)
    parser.add_argument("--weights", default="w16", choices=WEIGHTS)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "legato")
    parser.add_argument("--seconds", type=float, default=2.0, help="How long each shape is measured.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.model, arguments.weights, arguments.cache_dir, arguments.seconds)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
