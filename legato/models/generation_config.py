"""What a model's authors recommend for sampling: `generation_config.json` of a Hugging Face folder.

Taken from it are temperature, top_k, top_p, min_p and repetition_penalty, and nothing else; its EOS ids
belong to the tokenizer. GGUF files have no such thing.
"""

import typing
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from legato.errors import ModelError
from legato.text.folder_vocab import read_json

FILE = "generation_config.json"
LIMITS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0, 2),
        "top_k": (-1, 2**31 - 1),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "repetition_penalty": (0.01, 100),
    }
)
"""The least and the most of each, as in requests."""


def sampling_defaults(path: Path) -> dict[str, float]:
    """The recommended values in a model's folder; none for a file. Raises `ModelError` if one is no good."""
    found = (read_json(path / FILE) or {}) if path.is_dir() else {}
    return {name: _checked(found[name], name, path / FILE) for name in LIMITS if found.get(name) is not None}


def _checked(value: object, name: str, file: Path) -> float:
    least, most = LIMITS[name]
    kinds = (int,) if name == "top_k" else (int, float)
    if type(value) not in kinds or not least <= typing.cast(float, value) <= most:
        raise ModelError(
            f"{file}: {name} is {value!r:.100}, not from {least} to {most}; "
            "--generation-config none leaves the file unread"
        )
    return typing.cast(float, value)
