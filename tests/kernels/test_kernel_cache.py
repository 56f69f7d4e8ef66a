"""A file of compiled code that is not whole costs a warning and the time to compile it, and nothing else."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.kernels import cache
from legato.kernels.cache import DamagedError, Kernel, preparing, read_checked, write_checked


def double_kernel() -> Kernel:
    """double(team, work, numbers): doubles the first number."""
    version = cache.source_version()

    @numba.njit
    def double(team: int, work: int, numbers: Any) -> int:  # noqa: ARG001
        numbers[0] *= 2
        return version

    return Kernel(double, None)


def doubled() -> tuple[int, int]:
    """(2 x 21 by a new kernel, how much of it came from the disk)"""
    import numpy as np

    kernel, numbers = double_kernel(), np.array([21])
    kernel(0, numbers)
    return int(numbers[0]), kernel.num_cache_hits


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder for compiled kernels."""
    kept = tmp_path / "kernels"

    def only_here(self: cache.KernelCache, function: Callable[..., Any]) -> None:
        original(self, function)
        self._folders = [kept]

    original = cache.KernelCache.__init__
    monkeypatch.setattr(cache.KernelCache, "__init__", only_here)
    return kept


def to_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def invert(file: Path, start: int, end: int | None) -> None:
    content = bytearray(file.read_bytes())
    content[start:end] = bytes(byte ^ 255 for byte in content[start:end])
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut in the header": lambda file: os.truncate(file, 30),
    "cut in the machine code": lambda file: os.truncate(file, file.stat().st_size - 700),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "zeroed after the header": lambda file: file.write_bytes(
        file.read_bytes()[:60] + bytes(file.stat().st_size - 60)
    ),
    "inverted": lambda file: invert(file, 0, None),
    "one byte inverted": lambda file: invert(file, 5000, 5001),
    "digest inverted": lambda file: invert(file, len(cache.MAGIC), len(cache.MAGIC) + 32),
    "foreign": lambda file: file.write_text("#!/bin/sh\n"),
    "directory": to_directory,
    "whole, and not what numba wrote": lambda file: write_checked(file, b"\x80\x04]\x94."),
    "whole, and not a pickle": lambda file: write_checked(file, b"nothing"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_compiled_anew(
    folder: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    assert doubled() == (42, 0)
    (file,) = folder.glob("*.kernel")
    assert doubled() == (42, 1)
    damage(file)
    assert not caplog.records
    assert doubled() == (42, 0)
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert str(file) in warning.message
    if not file.is_dir():  # whatever a user put there in its place is left alone
        assert doubled() == (42, 1)
    assert list(folder.iterdir()) == [file]


def test_a_file_of_another_user_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its content would run as this user."""
    assert doubled() == (42, 0)
    (file,) = folder.glob("*.kernel")
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert doubled() == (42, 0)
    assert "belongs to another user" in caplog.text


def test_what_cannot_be_written_is_compiled_at_every_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "write_checked", full)
    kernel = double_kernel()
    assert kernel.problem is None
    assert doubled() == (42, 0)
    import numpy as np

    kernel(0, np.array([1]))
    assert kernel.problem == f"{folder}: No space left on device"
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_a_file_is_no_folder(folder: Path) -> None:
    folder.write_text("")
    assert doubled() == (42, 0)
    assert folder.read_text() == ""


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_checked(tmp_path / "x.kernel", b"1")
    assert list(tmp_path.iterdir()) == []


def test_old_versions_are_dropped(folder: Path) -> None:
    doubled()
    (file,) = folder.glob("*.kernel")
    stem = file.name.split("-")[0]
    for number in range(cache.KEPT_VERSIONS + 3):
        old = folder / f"{stem}-{number:024}.kernel"
        old.touch()
        os.utime(old, (number, number))
    file.unlink()
    doubled()
    kept = sorted(other.name for other in folder.iterdir())
    assert len(kept) == cache.KEPT_VERSIONS
    assert file.name in kept
    assert f"{stem}-{2:024}.kernel" not in kept


@given(content=st.binary(max_size=200), at=st.integers(0, 300), change=st.integers(1, 255), cut=st.booleans())
def test_no_change_of_a_file_is_overlooked(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, at: int, change: int, cut: bool
) -> None:
    file = tmp_path_factory.mktemp("kernel") / "x.kernel"
    write_checked(file, content)
    assert read_checked(file) == content
    whole = bytearray(file.read_bytes())
    at %= len(whole)
    if cut:
        del whole[at:]
    else:
        whole[at] ^= change
    file.write_bytes(whole)
    with pytest.raises(DamagedError):
        read_checked(file)


@pytest.mark.usefixtures("folder")
def test_only_a_start_that_compiles_says_so() -> None:
    told: list[list[str]] = [[], []]
    for lines in told:
        with preparing("double", lines.append):
            doubled()
            doubled()
    compiling = "compiling double kernels, which takes seconds and is done once"
    assert told == [["preparing double kernels", compiling], ["preparing double kernels"]]
