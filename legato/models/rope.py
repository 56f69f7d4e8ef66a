"""Rotary position embedding: angles from absolute positions, and the rotation of queries and keys.

It knows no chunks: a token's angle depends on its position alone, so whoever calls gives the position in the
sequence, never an offset in the step.

Shape legend: T tokens, N heads, D head size; pair i is the elements (i, i + D / 2).
"""

import math

import torch
from torch import Tensor

from legato.models.spec import FrequencyFactors, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling


class Rope:
    """Angles of one kind of layer, computed for each step: one product, and no table to keep."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim).float().to(device)  # [D / 2]
        self._scale = spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling) else 1.0

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin, [T, D / 2] fp32, of the absolute `positions` [T] int64."""
        angles = positions.float().unsqueeze(-1) * self._frequencies
        return angles.cos() * self._scale, angles.sin() * self._scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, N, D] with each pair turned by its token's angle; cos, sin [T, D / 2]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair, [D / 2] fp64 on the host: base^(-2i / D), scaled as `spec` says."""
    plain = spec.base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    match spec.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case FrequencyFactors(factors=factors):
            return plain / torch.tensor(factors, dtype=torch.float64)
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, scaling, spec.base)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow by `factor` the pairs that turn fewer than `low_freq_factor` times in the original context.

    Those that turn more than `high_freq_factor` times are left; those between are blended (Llama 3.1).
    """
    turns = scaling.original_max_position * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(plain / scaling.factor, plain, kept.clamp(0, 1))


def _yarn(plain: Tensor, scaling: YarnScaling, base: float) -> Tensor:
    """As `_llama3`, but blended linearly in the pair's index (Peng et al. 2023, section 3.2).

    The blend goes from the pair that turns `beta_fast` times in the original context (left as it is) to the
    one that turns `beta_slow` times (slowed by `factor`).
    """
    head_dim = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        wanted = scaling.original_max_position / (2 * math.pi * times)
        return head_dim * math.log(wanted) / (2 * math.log(base))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # Bounded by head_dim - 1, not by the last pair: so in the published code, and checkpoints rely on it.
    low, high = max(low, 0), min(high, head_dim - 1)
    slowed = (torch.arange(len(plain), dtype=torch.float64) - low) / ((high - low) or 0.001)
    return torch.lerp(plain, plain / scaling.factor, slowed.clamp(0, 1))
