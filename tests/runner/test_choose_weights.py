"""Which layers and which attention a runner gets, and why."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from runner_steps import CPU, LLAMA

from legato.errors import ConfigError
from legato.models import projection_cpu
from legato.models.projection import TorchOps
from legato.models.projection_cpu import CpuOps
from legato.models.spec import Family
from legato.runner.backends import (
    WEIGHTS,
    choose_activations,
    choose_attention,
    choose_weights,
    layer_ops,
)

SPEC = replace(LLAMA, head_dim=32, intermediate_size=64)
"""A model that every kind of weights works for."""
ODD = replace(SPEC, head_dim=8)


def take_fp16_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "quantized", SimpleNamespace())


def test_auto_takes_w16_where_it_works() -> None:
    assert choose_weights("auto", SPEC, CPU, torch.float32) == ("w16", "auto")


@pytest.mark.parametrize("kind", WEIGHTS)
def test_what_is_asked_for_is_taken(kind: str) -> None:
    assert choose_weights(kind, SPEC, CPU, torch.float32) == (kind, "asked for")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": 40}, "hidden size 40 is not a multiple of 16"),
        ({"intermediate_size": 72}, "MLP size 72 is not a multiple of "),
        ({"head_dim": 48}, "head size 48 is not a multiple of 32"),
    ],
)
def test_auto_takes_fp16_for_sizes_that_integers_do_not_work_with(
    change: dict[str, int], problem: str
) -> None:
    kind, why = choose_weights("auto", replace(SPEC, **change), CPU, torch.float32)
    assert kind == "fp16"
    assert why.startswith(f"auto; no w16: {problem}")


def test_auto_takes_fp16_where_integers_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection_cpu, "is_fast", lambda: False)
    kind, why = choose_weights("auto", SPEC, CPU, torch.float32)
    assert kind == "fp16"
    assert why == "auto; no w16: this processor has no instruction for sums of integer products"


def test_auto_falls_back_to_dense_by_name_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take_fp16_away(monkeypatch)
    with caplog.at_level(logging.WARNING):
        kind, why = choose_weights("auto", ODD, CPU, torch.float32)
    assert kind == "dense"
    assert why.startswith("no w16: head size 8 is not a multiple of 32; no fp16: AttributeError: ")
    assert why in caplog.text
    assert "not bit-exact" in caplog.text


def test_16_bit_activations_are_dense() -> None:
    kind, why = choose_weights("auto", SPEC, CPU, torch.bfloat16)
    assert kind == "dense"
    assert why == "no w16 or fp16: it needs float32 on a cpu, this is bfloat16 on cpu"


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_float16_is_refused_for_gemma_3_alone(family: Family, dtype: str) -> None:
    """F-18: its activations overflow, and it would answer with padding."""
    spec = replace(SPEC, family=family)
    if (family, dtype) == ("gemma3", "float16"):
        with pytest.raises(ConfigError, match=r"^dtype: float16 does not work for Gemma 3, .* 65504"):
            choose_activations(dtype, spec, CPU)
    else:
        name = "float32" if dtype == "auto" else dtype
        assert choose_activations(dtype, spec, CPU) == getattr(torch, name)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_auto_is_never_float16_even_on_a_gpu_without_bfloat16(
    capability: tuple[int, int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-18"""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    spec = replace(SPEC, family="gemma3")
    assert choose_activations("auto", spec, torch.device("cuda")) == expected


def test_what_cannot_work_is_refused_if_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("fp16", "w16", "w8"):
        with pytest.raises(ConfigError, match=f"{kind} does not work here: it needs float32 on a cpu"):
            choose_weights(kind, SPEC, CPU, torch.bfloat16)
    for kind in ("w16", "w8"):
        with pytest.raises(ConfigError, match=f"{kind} does not work here: head size 8 is not a multiple"):
            choose_weights(kind, ODD, CPU, torch.float32)
    take_fp16_away(monkeypatch)
    with pytest.raises(ConfigError, match="fp16 does not work here: AttributeError"):
        choose_weights("fp16", SPEC, CPU, torch.float32)


def test_without_fused_multiply_add_there_are_no_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection_cpu, "fuses_multiply_add", lambda: False)
    with pytest.raises(ConfigError, match="w16 does not work here: this processor has no fused multiply-add"):
        choose_weights("w16", SPEC, CPU, torch.float32)
    with pytest.raises(ConfigError, match="no fused multiply-add"):
        CpuOps("w16")


def test_each_kind_has_its_layers() -> None:
    assert {kind: type(layer_ops(kind)) for kind in WEIGHTS} == {
        "dense": TorchOps,
        "fp16": TorchOps,
        "w16": CpuOps,
        "w8": CpuOps,
    }


def test_attention_that_cannot_work_is_refused_or_replaced_by_name() -> None:
    spec = replace(LLAMA, head_dim=40)
    with pytest.raises(ConfigError, match="head size 40 is not a multiple of 16"):
        choose_attention("cpu", spec, CPU, None, lambda _: None)
    attention, why = choose_attention("auto", spec, CPU, None, lambda _: None)
    assert (attention.name, why) == ("reference", "cpu attention: head size 40 is not a multiple of 16")
    attention, why = choose_attention("reference", SPEC, CPU, None, lambda _: None)
    assert (attention.name, why) == ("reference", "asked for")
    attention, why = choose_attention("auto", SPEC, CPU, None, lambda _: None)
    assert (attention.name, why) == ("cpu", "auto")
