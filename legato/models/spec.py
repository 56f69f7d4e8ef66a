"""What a decoder of the Llama family is made of, in numbers: the one thing that a loader tells the model.

A `ModelSpec` is read from `config.json` or from GGUF metadata and drives one `Decoder`. It also lists every
tensor that must be there (`tensor_shapes`), under Legato's own names, so that each loader checks the same
things and the decoder trusts what it gets.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's smooth split between low and high frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): NTK-by-parts frequencies, cos and sin scaled by `attention_factor`."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyFactors:
    """Each inverse frequency divided by its own number: GGUF's `rope_freqs.weight`, length head_dim / 2."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


def longest_context(stated: int, scaling: RopeScaling | None) -> int:
    """Positions that the model can use: `stated`, or with YaRN `factor` times the original length.

    Recipes for YaRN add the scaling to a file and leave the file's own length as it was.
    """
    if isinstance(scaling, YarnScaling):
        return int(scaling.factor * scaling.original_max_position)
    return stated


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding of one kind of layer; pairs are (i, i + head_dim / 2) (the NeoX order)."""

    base: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What differs between layers."""

    rope: RopeSpec
    window: int | None = None
    """Sliding window: a query at position p sees keys p - window + 1 .. p. None sees all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: RMS norms, rotary positions, grouped-query attention, gated MLP."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Its own number: never assumed to be hidden_size / num_heads."""
    layers: tuple[LayerSpec, ...]
    max_position: int
    """Longest context that the model was made for, in tokens."""
    norm_eps: float
    activation: Activation = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k before the rotation (Qwen 3, Gemma 3)."""
    post_norms: bool = False
    """A norm after attention and one after the MLP, before each residual sum (Gemma 3)."""
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    attention_scale: float
    """Multiplies q k^T."""
    attention_softcap: float | None = None
    residual_scale: float = 1.0
    """Multiplies what attention and the MLP add to the residual stream."""
    logit_scale: float = 1.0
    """Multiplies the logits, before `logit_softcap`."""
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model by Legato's name, with its shape ([out, in] for matrices).

        Norm gains multiply as they are: a loader whose files store gain - 1 adds the 1.
        """
        hidden, head_dim = self.hidden_size, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden), "final_norm": (hidden,)}
        if not self.tie_embeddings:
            shapes["lm_head"] = (self.vocab_size, hidden)
        q_out, kv_out = self.num_heads * head_dim, self.num_kv_heads * head_dim
        matrices = {
            "q": (q_out, hidden, self.qkv_bias),
            "k": (kv_out, hidden, self.qkv_bias),
            "v": (kv_out, hidden, self.qkv_bias),
            "o": (hidden, q_out, self.o_bias),
            "gate": (self.intermediate_size, hidden, self.mlp_bias),
            "up": (self.intermediate_size, hidden, self.mlp_bias),
            "down": (hidden, self.intermediate_size, self.mlp_bias),
        }
        norms = {"attention_norm": hidden, "mlp_norm": hidden}
        if self.post_norms:
            norms |= {"post_attention_norm": hidden, "post_mlp_norm": hidden}
        if self.qk_norm:
            norms |= {"q_norm": head_dim, "k_norm": head_dim}
        for i in range(self.num_layers):
            for name, (rows, columns, bias) in matrices.items():
                shapes[f"layers.{i}.{name}"] = (rows, columns)
                if bias:
                    shapes[f"layers.{i}.{name}.bias"] = (rows,)
            shapes |= {f"layers.{i}.{name}": (size,) for name, size in norms.items()}
        return shapes
