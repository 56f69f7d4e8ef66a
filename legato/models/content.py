"""Whether the bytes of a model's files are those that they should be: looked at once, cheaply afterwards.

For some files the right SHA-256 is known: those of packaged models, and those that the Hugging Face hub or
Ollama keep under it. They are read in full once. Nothing is known of other files; their numbers are examined
once (`examine.py`). Either way a receipt says afterwards that this file, with this size, time of change and
inode, was found good, and holds the digest of a sample of its bytes. While a file matches its receipt, it is
not read again. A receipt that cannot be read or written costs only time.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from legato.errors import ModelError

logger = logging.getLogger(__name__)

BLOCK = 1 << 20
PAGE, PAGES = 4096, 256
"""A sample of a file: its first and last block, and so many pages between them."""

_SHA256 = re.compile(r"(?:sha256-)?([0-9a-f]{64})")
"""The name of a file that is kept under its digest: in the hub's cache, and in Ollama's."""
_HUB_NOTES = ".cache/huggingface/download"
"""Where `hf download --local-dir` notes the digest of each file, in the second line of FILE.metadata."""
_TIME_TO_NOTE_S = 5.0


class DamagedError(ModelError):
    """A file that is surely not what it should be."""


@dataclass(frozen=True, slots=True)
class Receipts:
    """What earlier starts found good. `folder` need not exist, nor be writable."""

    folder: Path

    def matches(self, path: Path) -> bool:
        """Whether the file was found good and is the same by size, time and inode.

        Raises `DamagedError` if its bytes differ all the same: nobody wrote to it, the storage lost them.
        """
        found = self._read(path)
        if found is None or found["file"] != _identity(path):
            return False
        if found["sample"] != sample_digest(path):
            raise DamagedError(
                f"{path}: damaged: its bytes differ from those of an earlier start, though its size and time "
                "of change are the same"
            )
        return True

    def write(self, path: Path) -> None:
        """The file was found good."""
        receipt: dict[str, object] = {"file": _identity(path), "sample": sample_digest(path)}
        receipt["digest"] = _digest_of(receipt)
        target = self._of(path)
        part = target.with_name(f"{target.name}.part{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(receipt))
            part.replace(target)
        except OSError as error:
            logger.info("%s: that it is whole cannot be noted in %s (%s)", path, target, error.strerror)
            with suppress(OSError):
                part.unlink()

    def _read(self, path: Path) -> dict[str, object] | None:
        try:
            receipt = json.loads(self._of(path).read_bytes())
            return receipt if receipt.pop("digest") == _digest_of(receipt) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def _of(self, path: Path) -> Path:
        return self.folder / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"


def receipts_in(cache_dir: Path) -> Receipts:
    """Those of one cache folder."""
    return Receipts(cache_dir / "checked")


def check_digest(path: Path, sha256: str, receipts: Receipts) -> None:
    """Read the file in full, unless an earlier start did. Raises `DamagedError` if it has another digest."""
    with suppress(DamagedError):
        if receipts.matches(path):
            return
    found = file_sha256(path)
    if found != sha256:
        raise DamagedError(f"{path}: damaged: its SHA-256 is {found[:16]}..., it should be {sha256[:16]}...")
    receipts.write(path)


def check_files(
    paths: Sequence[Path], receipts: Receipts, progress: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Those of a model's files of which nothing is known: their numbers have to be examined.

    Raises `DamagedError` for a file that differs from what it should be.
    """
    unknown = []
    for path in paths:
        sha256 = known_sha256(path)
        if sha256 is None:
            unknown += [] if receipts.matches(path) else [path]
        else:
            progress(f"checking {path.name}")
            check_digest(path, sha256, receipts)
    return unknown


def known_sha256(path: Path) -> str | None:
    """The SHA-256 that a file should have, if its name or a note of the hub's tools tells it."""
    named = _SHA256.fullmatch(path.resolve().name)
    if named is not None:
        return named[1]
    note = path.parent / _HUB_NOTES / f"{path.name}.metadata"
    try:
        _, etag, noted = note.read_text().split()
        # A file that is newer than its note was changed on purpose.
        is_current = path.stat().st_mtime <= float(noted) + _TIME_TO_NOTE_S
    except (OSError, ValueError):
        return None
    match = _SHA256.fullmatch(etag)
    return match[1] if match is not None and is_current else None


def file_sha256(path: Path) -> str:
    """Raises `ModelError` if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error


def sample_digest(path: Path) -> str:
    """Of the first and the last block and of pages at even distances. Raises `ModelError`."""
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(file.read(BLOCK))
            for number in range(1, PAGES):
                file.seek(size * number // PAGES)
                digest.update(file.read(PAGE))
            file.seek(max(size - BLOCK, 0))
            digest.update(file.read(BLOCK))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _identity(path: Path) -> list[object]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]


def _digest_of(receipt: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(receipt, sort_keys=True).encode()).hexdigest()
