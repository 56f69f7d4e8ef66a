"""Tiny random models and hand-made step plans for the runner's tests. No scheduler is involved."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from legato.attention.reference import ReferenceAttention
from legato.core.request import RequestId
from legato.core.step_plan import ForwardBatch, ForwardSeq, SampleRow, StepPlan, TokenLogprobs
from legato.models.decoder import Decoder
from legato.models.linear import DenseLinear, LinearFactory
from legato.models.projection import TorchOps
from legato.models.spec import LayerSpec, ModelSpec, RopeSpec
from legato.runner.kv_cache import KVCache
from legato.runner.runner import TorchRunner
from legato.sampling_params import SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE = 4
VOCAB = 199
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)

LLAMA = ModelSpec(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    layers=(LayerSpec(rope=RopeSpec(base=10_000.0)),) * 3,
    max_position=512,
    norm_eps=1e-6,
    attention_scale=8**-0.5,
)

GEMMA = replace(
    LLAMA,
    family="gemma3",
    num_kv_heads=1,
    head_dim=16,
    layers=(
        LayerSpec(rope=RopeSpec(base=10_000.0), window=8),
        LayerSpec(rope=RopeSpec(base=10_000.0), window=8),
        LayerSpec(rope=RopeSpec(base=1_000_000.0)),
    ),
    activation="gelu_tanh",
    qk_norm=True,
    post_norms=True,
    tie_embeddings=True,
    embedding_scale=32**0.5,
    attention_scale=16**-0.5,
)


def tiny_weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Random weights by `spec`, the same for every call."""
    generator = torch.Generator().manual_seed(20260801)
    return {
        name: 1 + 0.2 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 1.5 / shape[1] ** 0.5
        for name, shape in spec.tensor_shapes().items()
    }


def tiny_runner(
    spec: ModelSpec,
    *,
    num_blocks: int = 64,
    block_size: int = BLOCK_SIZE,
    linear: LinearFactory = DenseLinear,
) -> TorchRunner:
    """A runner over a model of fixed random weights: the same for every call."""
    decoder = Decoder(spec, tiny_weights(spec), attention=ReferenceAttention(), ops=TorchOps(linear))
    cache = KVCache(spec, num_blocks=num_blocks, block_size=block_size, dtype=torch.float32, device=CPU)
    return TorchRunner(decoder, cache)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Stream:
    """One request as a scheduler would drive it: its tokens so far and how many of them are computed."""

    blocks: tuple[int, ...]
    prompt: list[int]
    params: SamplingParams = GREEDY
    id: str = "a"
    computed: int = 0
    sampled: list[TokenLogprobs] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return [sampled.token for sampled in self.sampled]

    @property
    def remaining(self) -> int:
        return len(self.prompt) + len(self.sampled) - self.computed


def step(runner: TorchRunner, work: Sequence[tuple[Stream, int]]) -> None:
    """One mixed step: for each stream its next tokens, at most so many, sampled where they reach the end."""
    seqs, rows, drawing = [], [], []
    for stream, limit in work:
        known = stream.prompt + stream.generated
        run = tuple(known[stream.computed : stream.computed + limit])
        seqs.append(ForwardSeq(RequestId(stream.id), run, stream.computed, stream.blocks))
        stream.computed += len(run)
        if stream.remaining == 0:
            prompt, generated = tuple(stream.prompt), tuple(stream.generated)
            row = SampleRow(
                len(seqs) - 1, RequestId(stream.id), stream.params, len(generated), prompt, generated
            )
            rows.append(row)
            drawing.append(stream)
    result = runner.run(StepPlan(ForwardBatch(tuple(seqs)), tuple(rows)))
    for stream, sampled in zip(drawing, result.sampled, strict=True):
        stream.sampled.append(sampled)


def complete(runner: TorchRunner, stream: Stream, num_tokens: int, *, chunk: int = 1000) -> Stream:
    """Prefill in chunks, then decode until the stream has `num_tokens` generated tokens."""
    while len(stream.sampled) < num_tokens:
        step(runner, [(stream, chunk)])
    return stream
