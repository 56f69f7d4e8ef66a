"""What the decoder does with memory, rows and linear layers; its numbers are checked against transformers."""

from dataclasses import replace

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from legato.attention.base import AttentionBatch, LayerCache
from legato.attention.reference import ReferenceAttention
from legato.models.decoder import Decoder
from legato.models.linear import DenseLinear
from legato.models.projection import TorchOps
from legato.models.spec import LayerSpec, ModelSpec, RopeSpec

SPEC = ModelSpec(
    family="qwen2",
    vocab_size=29,
    hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    layers=(LayerSpec(rope=RopeSpec(base=10_000.0)),) * 2,
    max_position=64,
    norm_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=True,
    attention_scale=6**-0.5,
)


def random_weights(spec, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in spec.tensor_shapes().items()
    }


def one_sequence(spec, count):
    """Cache and layout of one sequence of `count` tokens in one block."""
    shape = (1, count, spec.num_kv_heads, spec.head_dim)
    cache = [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in spec.layers]
    batch = AttentionBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        start=torch.tensor([0], dtype=torch.int32),
        block_table=torch.tensor([[0]], dtype=torch.int32),
        slots=torch.arange(count),
    )
    return cache, batch


def run(decoder, count, rows):
    cache, batch = one_sequence(decoder.spec, count)
    tokens = torch.arange(count) % decoder.spec.vocab_size
    return decoder.forward(tokens, torch.arange(count), batch, cache, torch.tensor(rows, dtype=torch.int64))


class RecordingFactory:
    """Makes dense layers; remembers the weights it was given, and how many rows each call had."""

    def __init__(self):
        self.weights = []
        self.rows = []

    def __call__(self, weight, bias):
        layer, index = DenseLinear(weight, bias), len(self.weights)
        self.weights.append(weight)
        self.rows.append([])

        def call(x):
            self.rows[index].append(len(x))
            return layer(x)

        return call


@pytest.mark.parametrize("rows", [[], [4], [6, 0, 3], [2, 2]])
def test_only_the_rows_asked_for_reach_the_head_in_the_order_asked(rows):
    factory = RecordingFactory()
    decoder = Decoder(SPEC, random_weights(SPEC), attention=ReferenceAttention(), ops=TorchOps(factory))
    logits = run(decoder, 7, rows)
    assert logits.shape == (len(rows), SPEC.vocab_size)
    assert logits.dtype == torch.float32
    assert factory.rows[0] == ([len(rows)] if rows else [])
    torch.testing.assert_close(logits, run(decoder, 7, list(range(7)))[rows])


def test_the_weights_are_consumed_joined_and_the_tied_head_shares_the_embedding():
    """F-07: a tied head is the embedding itself."""
    weights, factory = random_weights(SPEC), RecordingFactory()
    embedding, output = weights["embed"], weights["layers.0.o"]
    Decoder(SPEC, weights, attention=ReferenceAttention(), ops=TorchOps(factory))
    assert weights == {}
    head, qkv, o, gate_up, down = factory.weights[:5]
    assert (len(qkv), len(gate_up), len(down)) == ((4 + 2 * 2) * 6, 2 * 20, 12)
    assert head.data_ptr() == embedding.data_ptr()
    assert o.data_ptr() == output.data_ptr()


def test_an_untied_head_is_its_own_matrix():
    """F-06: without tying, the LM head of the files is used."""
    spec = replace(SPEC, tie_embeddings=False)
    weights, factory = random_weights(spec), RecordingFactory()
    head = weights["lm_head"]
    Decoder(spec, weights, attention=ReferenceAttention(), ops=TorchOps(factory))
    assert factory.weights[0] is head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_embedding_factor_is_rounded_to_the_type_of_the_weights(dtype):
    # No layer, a norm that divides and multiplies by 2^20, and an identity for a head: the logits are the
    # embeddings.
    spec = replace(
        SPEC,
        vocab_size=12,
        layers=(),
        tie_embeddings=False,
        embedding_scale=12**0.5,
        norm_eps=2.0**40,
    )
    table = torch.randn(12, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights = {
        "embed": table,
        "final_norm": torch.full((12,), 2.0**20),
        "lm_head": torch.eye(12, dtype=dtype),
    }
    published = Gemma3TextScaledWordEmbedding(12, 12, 0, embed_scale=12**0.5).to(dtype)
    published.weight.data.copy_(table)
    decoder = Decoder(spec, weights, attention=ReferenceAttention())
    assert torch.equal(run(decoder, 12, list(range(12))), published(torch.arange(12)).detach().float())


def test_the_soft_cap_bounds_the_logits():
    spec = replace(SPEC, logit_softcap=0.5)
    free = run(Decoder(SPEC, random_weights(SPEC), attention=ReferenceAttention()), 5, [0, 4])
    capped = run(Decoder(spec, random_weights(SPEC), attention=ReferenceAttention()), 5, [0, 4])
    torch.testing.assert_close(capped, 0.5 * torch.tanh(free / 0.5))


def test_device_and_type_are_those_of_the_weights():
    decoder = Decoder(SPEC, random_weights(SPEC, torch.bfloat16), attention=ReferenceAttention())
    assert decoder.dtype == torch.bfloat16
    assert decoder.device == torch.device("cpu")
