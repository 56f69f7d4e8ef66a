"""Fixtures shared by all rooms: the real model files, and an environment without the user's own settings."""

import os
from pathlib import Path

import pytest

from legato.models.packaged import find_packaged
from legato.models.source import resolve


def _packaged_path(name: str, config: pytest.Config) -> Path:
    model = find_packaged(name)
    assert model is not None
    if model.missing_modules:
        pytest.skip(f"{model.name} is not installed: {model.install_hint}")
    return resolve(name, cache_dir=config.cache.mkdir("legato")).path


@pytest.fixture(scope="session")
def gemma_path(pytestconfig: pytest.Config) -> Path:
    """The demo model, Gemma 3 270M, as one GGUF file."""
    return _packaged_path("gemma3-270m", pytestconfig)


@pytest.fixture(scope="session")
def qwen_path(pytestconfig: pytest.Config) -> Path:
    """Qwen 2.5 Coder 1.5B as one GGUF file. Tests that use it are marked `big`."""
    return _packaged_path("qwen2.5-coder-1.5b-instruct", pytestconfig)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LEGATO_")]:
        monkeypatch.delenv(name)
