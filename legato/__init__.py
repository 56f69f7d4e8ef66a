"""Legato: an LLM inference server with chunked prefill at its core.

What needs torch is loaded when it is first asked for, so that the pure parts can be used without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legato.config import EngineSettings, ModelSettings
    from legato.engine.async_llm import AsyncLLM
    from legato.engine.inputs import Completion
    from legato.engine.llm import LLM
    from legato.engine.output_processor import Delta
    from legato.engine.params import SamplingParams
    from legato.errors import (
        ConfigError,
        ConstraintError,
        ContextLengthError,
        DeadlineError,
        LegatoError,
        ModelError,
        QueueFullError,
        RequestError,
        StepError,
        UnavailableError,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "ConfigError",
    "ConstraintError",
    "ContextLengthError",
    "DeadlineError",
    "Delta",
    "EngineSettings",
    "LegatoError",
    "ModelError",
    "ModelSettings",
    "QueueFullError",
    "RequestError",
    "SamplingParams",
    "StepError",
    "UnavailableError",
    "__version__",
]

_HOMES = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.async_llm",
    "Completion": "engine.inputs",
    "Delta": "engine.output_processor",
    "SamplingParams": "engine.params",
    "EngineSettings": "config",
    "ModelSettings": "config",
}
"""Where public names are defined; errors are in `errors`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"legato.{_HOMES.get(name, 'errors')}"), name)
