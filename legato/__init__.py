"""Legato: an LLM inference server with chunked prefill at its core."""

__version__ = "0.1.0"
