"""Rotary angles: absolute positions, and each scaling against the published formulas."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from legato.models.config_json import spec_from_config
from legato.models.rope import Rope, inverse_frequencies, rotate
from legato.models.spec import FrequencyFactors, LinearScaling, RopeSpec
from legato.text.json_object import JsonObject

CPU = torch.device("cpu")


def rope_of(config):
    """The rope of the first layer of a config.json."""
    return spec_from_config(JsonObject(values=config, where="config.json")).layers[0].rope


LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}
PUBLISHED = {
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
    "llama3": LLAMA_3_1,
    "llama3 with a wide band": {**LLAMA_3_1, "factor": 32.0, "high_freq_factor": 64.0},
    "yarn": QWEN_YARN,
    "yarn, not truncated": {**QWEN_YARN, "truncate": False},
    "yarn, betas": {**QWEN_YARN, "beta_fast": 20.0, "beta_slow": 3.0},
    "yarn, betas that meet": {**QWEN_YARN, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
    "yarn, short context": {**QWEN_YARN, "rope_theta": 100.0, "original_max_position_embeddings": 64},
    "yarn, long context": {**QWEN_YARN, "rope_theta": 100.0, "original_max_position_embeddings": 4096},
    "yarn, stated attention": {**QWEN_YARN, "attention_factor": 1.7},
    "yarn, mscale": {**QWEN_YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
}


@pytest.mark.parametrize("parameters", PUBLISHED.values(), ids=PUBLISHED)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scaled_frequencies_agree_with_the_published_formulas(parameters, head_dim):
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131_072, rope_parameters=dict(parameters))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, CPU)
    spec = rope_of(config.to_dict() | {"model_type": "llama"})
    torch.testing.assert_close(inverse_frequencies(spec, head_dim).float(), expected, rtol=2e-6, atol=0)
    cos, _ = Rope(spec, head_dim, CPU)(torch.tensor([0]))
    torch.testing.assert_close(cos, torch.full((1, head_dim // 2), float(attention_factor)))


def test_an_original_length_beside_the_rope_parameters_wins_over_the_one_inside():
    config = LlamaConfig(
        head_dim=64,
        max_position_embeddings=131_072,
        original_max_position_embeddings=1024,
        rope_parameters=dict(QWEN_YARN),
    )
    stored = config.to_dict()
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    spec = rope_of(stored)
    torch.testing.assert_close(inverse_frequencies(spec, 64).float(), expected, rtol=2e-6, atol=0)


def test_each_pair_is_divided_by_its_own_frequency_factor():
    plain = RopeSpec(base=500_000.0)
    factors = (1.0, 1.5, 4.0, 8.0)
    scaled = inverse_frequencies(replace(plain, scaling=FrequencyFactors(factors=factors)), 8)
    torch.testing.assert_close(scaled * torch.tensor(factors).double(), inverse_frequencies(plain, 8))


@given(st.lists(st.integers(0, 131_071), min_size=1, max_size=8), st.integers(0, 7))
@settings(max_examples=50, deadline=None)
def test_an_angle_depends_on_the_absolute_position_alone(positions, index):
    """E-08: a token in a later chunk has the angle that it has in one whole pass."""
    rope = Rope(RopeSpec(base=10_000.0), 8, CPU)
    index %= len(positions)
    cos, sin = rope(torch.tensor(positions))
    for pair in range(4):
        angle = positions[index] * 10_000.0 ** (-pair / 4)
        assert math.isclose(cos[index, pair], math.cos(angle), abs_tol=1e-2)
        assert math.isclose(sin[index, pair], math.sin(angle), abs_tol=1e-2)
    alone = rope(torch.tensor(positions[index : index + 1]))
    assert torch.equal(torch.stack(alone)[:, 0], torch.stack((cos, sin))[:, index])


def test_linear_scaling_slows_all_pairs_alike():
    rope, slowed = (
        Rope(RopeSpec(base=10_000.0, scaling=scaling), 8, CPU)
        for scaling in (None, LinearScaling(factor=4.0))
    )
    torch.testing.assert_close(slowed(torch.tensor([44])), rope(torch.tensor([11])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_turns_pairs_half_a_head_apart(dtype):
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]], dtype=dtype)  # pairs (1, 0) and (0, 2)
    angles = torch.tensor([[math.pi / 2, math.pi / 6]])
    turned = rotate(x, angles.cos(), angles.sin())
    assert turned.dtype == dtype
    expected = torch.tensor([[[0.0, -1.0, 1.0, math.sqrt(3)]]], dtype=dtype)
    torch.testing.assert_close(turned, expected, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
