"""Which linear layers a runner gets, and why."""

import logging

import pytest
import torch

from legato.errors import ConfigError
from legato.runner import load
from legato.runner.load import choose_weights

CPU = torch.device("cpu")


def test_auto_takes_fp16_where_it_works() -> None:
    assert choose_weights("auto", CPU, torch.float32) == ("fp16", "auto")


@pytest.mark.parametrize("kind", ["dense", "fp16", "w8"])
def test_what_is_asked_for_is_taken(kind: str) -> None:
    assert choose_weights(kind, CPU, torch.float32) == (kind, "asked for")


def test_auto_falls_back_by_name_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load, "obstacle", lambda kind: "no such kernel")  # noqa: ARG005
    with caplog.at_level(logging.WARNING):
        kind, why = choose_weights("auto", CPU, torch.float32)
    assert (kind, why) == ("dense", "no fp16: no such kernel")
    assert "fp16 does not work here (no such kernel)" in caplog.text


def test_what_cannot_work_is_refused_if_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="w8 does not work here: it needs float32 on a cpu, this is bfloat16"
    ):
        choose_weights("w8", CPU, torch.bfloat16)
    monkeypatch.setattr(load, "obstacle", lambda kind: "no such kernel")  # noqa: ARG005
    with pytest.raises(ConfigError, match="fp16 does not work here: no such kernel"):
        choose_weights("fp16", CPU, torch.float32)
