"""Legato: an LLM inference server with chunked prefill at its core.

`LLM` loads torch when it is first asked for, so that the pure parts can be used without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legato.core.request import SamplingParams
    from legato.engine.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from legato.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from legato.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
