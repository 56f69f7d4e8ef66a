"""One decoder for the Llama family: the tokens of a mixed step in, the logits of chosen rows out.

A `ModelSpec` says everything that differs between models. The decoder knows no requests, chunks, samplers or
file formats, and nothing here loops over sequences: each operation runs once over all rows of the step, and
only the attention back end knows where one sequence ends.

Shape legend: T tokens of the step, R rows whose logits are wanted, E hidden size, F MLP size, H query heads,
G key-value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from legato.attention.base import AttentionBackend, AttentionBatch, AttentionParams, LayerCache
from legato.models.linear import DenseLinear, Linear, LinearFactory
from legato.models.rope import Rope, rotate
from legato.models.spec import Activation, ModelSpec, RopeSpec

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's weights. Norm gains are fp32: they are small, and Gemma's lose digits in bf16."""

    rope: RopeSpec
    attention: AttentionParams
    attention_norm: Tensor  # [E]
    qkv: Linear  # E -> (H + 2 G) D
    qk_norm: Tensor | None  # [H + G, D]: the gain of q's heads, then of k's
    o: Linear  # H D -> E
    post_attention_norm: Tensor | None  # [E]
    mlp_norm: Tensor  # [E]
    gate_up: Linear  # E -> 2 F
    down: Linear  # F -> E
    post_mlp_norm: Tensor | None  # [E]


class Weights(Protocol):
    """Tensors by Legato's name; each is taken once."""

    def pop(self, name: str, /) -> Tensor: ...


class Decoder:
    """The model on one device. Calls depend on the arguments only; the cache is the caller's."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        attention: AttentionBackend,
        linear: LinearFactory = DenseLinear,
        embedding_dtype: torch.dtype | None = None,
    ) -> None:
        """Take the tensors named by `spec.tensor_shapes()` out of `weights`.

        They are taken one by one as the layers are built, so that a matrix that was joined or packed into
        another form does not stay in memory twice. The embedding matrix is kept as `embedding_dtype`, or as
        it is.
        """
        self.spec = spec
        embedding = weights.pop("embed")  # [V, E]
        self.dtype = embedding.dtype
        """Of the activations between layers, and of K and V as they are handed to attention."""
        # The published models round this factor to the weights' dtype, and were trained so.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype).item()
        self._attention = attention
        self._activation = _ACTIVATIONS[spec.activation]
        self._layers = [_take_layer(spec, i, weights, linear) for i in range(spec.num_layers)]
        self._ropes = {layer.rope: Rope(layer.rope, spec.head_dim, embedding.device) for layer in spec.layers}
        self._final_norm = weights.pop("final_norm").float()  # [E]
        self._lm_head = linear(embedding if spec.tie_embeddings else weights.pop("lm_head"), None)
        self._embedding = embedding.to(embedding_dtype or self.dtype)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def forward(
        self,
        token_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64, absolute in each row's own sequence
        batch: AttentionBatch,
        cache: Sequence[LayerCache],  # one per layer; the step's K and V are written into it
        rows: Tensor,  # [R] int64: the rows of the step whose logits are wanted; may be empty
    ) -> Tensor:  # [R, V] fp32
        """Compute one step. The LM head runs for `rows` only: a prompt's middle rows never need it.

        The result is an inference tensor: it may be changed in place under `torch.inference_mode` only.
        """
        with torch.inference_mode():
            x = F.embedding(token_ids, self._embedding).to(self.dtype) * self._embedding_scale
            turns = {spec: rope(positions) for spec, rope in self._ropes.items()}
            for layer, layer_cache in zip(self._layers, cache, strict=True):
                x = x + self._attend(layer, x, turns[layer.rope], batch, layer_cache)
                x = x + self._mlp(layer, x)
            if not len(rows):
                return x.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
            logits = self._lm_head(self._norm(x[rows], self._final_norm)).float()
            cap = self.spec.logit_softcap
            return logits if cap is None else cap * torch.tanh(logits / cap)

    def _attend(
        self, layer: _Layer, x: Tensor, turn: tuple[Tensor, Tensor], batch: AttentionBatch, cache: LayerCache
    ) -> Tensor:  # [T, E]
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv = layer.qkv(self._norm(x, layer.attention_norm)).view(len(x), heads + 2 * kv_heads, -1)
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        q, k = torch.split(rotate(qk, *turn), [heads, kv_heads], dim=1)
        out = layer.o(self._attention(q, k, v, cache, batch, layer.attention).flatten(1))
        return out if layer.post_attention_norm is None else self._norm(out, layer.post_attention_norm)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:  # [T, E]
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
        out = layer.down(self._activation(gate) * up)
        return out if layer.post_mlp_norm is None else self._norm(out, layer.post_mlp_norm)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMS norm over the last dimension, in fp32 up to the cast (Zhang and Sennrich 2019)."""
        return (F.rms_norm(x.float(), x.shape[-1:], eps=self.spec.norm_eps) * gain).to(x.dtype)


def _take_layer(spec: ModelSpec, index: int, weights: Weights, linear: LinearFactory) -> _Layer:
    """Move layer `index` out of `weights`, with q, k, v in one matrix and gate, up in another."""

    def take(name: str) -> Tensor:
        return weights.pop(f"layers.{index}.{name}")

    def gain(name: str) -> Tensor:
        return take(name).float()

    def joined(*names: str, bias: bool) -> Linear:
        matrix = _join([take(name) for name in names])
        return linear(matrix, _join([take(f"{name}.bias") for name in names]) if bias else None)

    qk_norm = None
    if spec.qk_norm:
        q_gain, k_gain = gain("q_norm"), gain("k_norm")
        qk_norm = torch.cat((q_gain.expand(spec.num_heads, -1), k_gain.expand(spec.num_kv_heads, -1)))
    layer = spec.layers[index]
    return _Layer(
        rope=layer.rope,
        attention=AttentionParams(spec.attention_scale, layer.window, spec.attention_softcap),
        attention_norm=gain("attention_norm"),
        qkv=joined("q", "k", "v", bias=spec.qkv_bias),
        qk_norm=qk_norm,
        o=joined("o", bias=spec.o_bias),
        post_attention_norm=gain("post_attention_norm") if spec.post_norms else None,
        mlp_norm=gain("mlp_norm"),
        gate_up=joined("gate", "up", bias=spec.mlp_bias),
        down=joined("down", bias=spec.mlp_bias),
        post_mlp_norm=gain("post_mlp_norm") if spec.post_norms else None,
    )


def _join(parts: list[Tensor]) -> Tensor:
    """The parts' rows one after another; a lone part as it is, since copying it would be waste."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
