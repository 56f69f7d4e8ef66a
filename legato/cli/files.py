"""Files that a command writes: whether it can is found out before the work."""

import os
from pathlib import Path

from legato.errors import ConfigError


def check_writable(*paths: Path | None) -> None:
    """Raise `ConfigError` for the first file that cannot be written. Nothing is created or changed."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"{path}: cannot be written (it is a folder)")
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: cannot be written (there is no folder {path.parent})")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{path}: cannot be written (Permission denied)")


def write(path: Path, text: str) -> None:
    """Raises `ConfigError` if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
