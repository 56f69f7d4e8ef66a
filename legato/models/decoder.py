"""One decoder for the Llama family: the tokens of a mixed step in, the logits of chosen rows out.

A `ModelSpec` says everything that differs between models. The decoder knows no requests, chunks, samplers or
file formats, and nothing here loops over sequences: each operation runs once over all rows of the step, and
only the attention back end knows where one sequence ends.

Shape legend: T tokens of the step, R rows whose logits are wanted, E hidden size, F MLP size, H query heads,
G key-value heads, D head size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from legato.attention.base import AttentionBackend, AttentionBatch, AttentionParams, LayerCache
from legato.models.projection import After, LayerOps, Norm, Projection, TorchOps
from legato.models.rope import Rope
from legato.models.spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's weights. Norms are part of the projection that they come before or after."""

    rope: RopeSpec
    attention: AttentionParams
    qkv: Projection  # E -> (H + 2 G) D
    qk_norm: Norm | None  # gain [H + G, D]: of q's heads, then of k's
    o: Projection  # H D -> E
    gate_up: Projection  # E -> F
    down: Projection  # F -> E


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
        ops: LayerOps | None = None,
    ) -> None:
        """Take the tensors named by `spec.tensor_shapes()` out of `weights`.

        They are taken one by one as the layers are built, so that a matrix that was joined or packed into
        another form does not stay in memory twice.
        """
        ops = ops or TorchOps()
        self.spec = spec
        embedding = weights.pop("embed")  # [V, E]
        self.device = embedding.device
        self.dtype = embedding.dtype
        """Of the activations between layers, and of K and V as they are handed to attention."""
        self._attention = attention
        self._ops = ops
        self._ropes = {layer.rope: Rope(layer.rope, spec.head_dim, self.device) for layer in spec.layers}
        final_norm = Norm(weights.pop("final_norm").float(), spec.norm_eps)
        # The published models round this factor to the weights' dtype, and were trained so.
        scale = torch.tensor(spec.embedding_scale, dtype=self.dtype).item()
        tied = spec.tie_embeddings
        self._lm_head = ops.head(embedding if tied else weights.pop("lm_head"), final_norm)
        self._embed = ops.embedding(embedding, scale, self._lm_head if tied else None)
        del embedding
        self._layers = [_take_layer(spec, i, weights, ops) for i in range(spec.num_layers)]

    def forward(
        self,
        token_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64, absolute in each row's own sequence
        batch: AttentionBatch,
        cache: Sequence[LayerCache],  # one per layer; the step's K and V are written into it
        rows: Tensor,  # [R] int64: the rows of the step whose logits are wanted; may be empty
    ) -> Tensor:  # [R, V] fp32
        """One step: the `logits` of `rows` of `hidden`. A prompt's middle rows never need them.

        The result is an inference tensor: it may be changed in place under `torch.inference_mode` only. The
        next call may overwrite it.
        """
        return self.logits(self.hidden(token_ids, positions, batch, cache)[rows])

    def hidden(
        self,
        token_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64, absolute in each row's own sequence
        batch: AttentionBatch,
        cache: Sequence[LayerCache],  # one per layer; the step's K and V are written into it
    ) -> Tensor:  # [T, E]
        """All layers, without the LM head."""
        with torch.inference_mode():
            x = self._embed(token_ids)
            angles = {spec: rope(positions) for spec, rope in self._ropes.items()}
            kv_heads = self.spec.num_kv_heads
            heads = self.spec.num_heads + kv_heads
            for layer, layer_cache in zip(self._layers, cache, strict=True):
                qkv = layer.qkv(x).view(len(x), heads + kv_heads, -1)
                qk = self._ops.rope(qkv, heads, angles[layer.rope], layer.qk_norm)
                q, k = torch.split(qk, [self.spec.num_heads, kv_heads], dim=1)
                out = self._attention(q, k, qkv[:, heads:], layer_cache, batch, layer.attention)
                layer.o.add_to(x, out.flatten(1))
                layer.down.add_to(x, layer.gate_up(x))
            return x

    def logits(self, hidden: Tensor) -> Tensor:  # [R, E] -> [R, V] fp32
        """The LM head. The next call may overwrite the result."""
        with torch.inference_mode():
            if not len(hidden):
                return hidden.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
            logits = self._lm_head(hidden).float()
            if self.spec.logit_scale != 1.0:
                logits = logits * self.spec.logit_scale
            cap = self.spec.logit_softcap
            return logits if cap is None else cap * torch.tanh(logits / cap)


def _take_layer(spec: ModelSpec, index: int, weights: Weights, ops: LayerOps) -> _Layer:
    """Move layer `index` out of `weights`, with q, k, v in one matrix and gate, up in another."""

    def take(name: str) -> Tensor:
        return weights.pop(f"layers.{index}.{name}")

    def norm(name: str, scale: float = 1.0) -> Norm:
        return Norm(_scaled(take(name).float(), scale), spec.norm_eps)

    def joined(*names: str, bias: bool, before: Norm | None = None, after: After = None) -> Projection:
        matrix = _join([take(name) for name in names])
        biases = _join([take(f"{name}.bias") for name in names]) if bias else None
        return ops.projection(matrix, biases, before=before, after=after)

    def into_residual(name: str, *, bias: bool, post_norm: str) -> Projection:
        """What is added to the residual stream; `residual_scale` is part of its last factor."""
        scale = spec.residual_scale
        if spec.post_norms:
            return joined(name, bias=bias, after=norm(post_norm, scale))
        biases = _scaled(take(f"{name}.bias"), scale) if bias else None
        return ops.projection(_scaled(take(name), scale), biases)

    qk_norm = None
    if spec.qk_norm:
        q, k = norm("q_norm").gain, norm("k_norm").gain
        gain = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        qk_norm = Norm(gain, spec.norm_eps)
    layer = spec.layers[index]
    return _Layer(
        rope=layer.rope,
        attention=AttentionParams(spec.attention_scale, layer.window, spec.attention_softcap),
        qkv=joined("q", "k", "v", bias=spec.qkv_bias, before=norm("attention_norm")),
        qk_norm=qk_norm,
        o=into_residual("o", bias=spec.o_bias, post_norm="post_attention_norm"),
        gate_up=joined("gate", "up", bias=spec.mlp_bias, before=norm("mlp_norm"), after=spec.activation),
        down=into_residual("down", bias=spec.mlp_bias, post_norm="post_mlp_norm"),
    )


def _join(parts: list[Tensor]) -> Tensor:
    """The parts' rows one after another; a lone part as it is, since copying it would be waste."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    """The tensor times `scale`; the same tensor where that changes nothing."""
    return tensor if scale == 1.0 else tensor * scale
