"""Compiled kernels are kept on disk. A file is used only if it is whole, else the kernel is compiled again.

numba's own cache believes its files: an empty one ends the process, and a damaged one runs damaged machine
code. Here every file carries the SHA-256 of its content, which is checked before anything is decoded. The
decoding itself is numba's, and code runs in it, as it does when a compiled Python module is imported; so
files of other users are not read.
"""

# numba's types describe only some of its uses.
# mypy: disable-error-code="no-untyped-call, attr-defined"

import hashlib
import inspect
import logging
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import types
from numba.core import caching, sigutils
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps, loads
from numba.misc.appdirs import AppDirs

logger = logging.getLogger(__name__)

MAGIC = b"legato kernel 1\n"
KEPT_VERSIONS = 8
"""Files of one kernel in one folder: other versions of its source, and other processors, have their own."""


_on_compile: ContextVar[Callable[[], None]] = ContextVar("on_compile", default=lambda: None)


@contextmanager
def preparing(kernels: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Tell that kernels are prepared within the block, and that they are compiled if they have to be."""
    progress(f"preparing {kernels} kernels")
    waits = [f"compiling {kernels} kernels, which takes seconds and is done once"]

    def tell() -> None:
        if waits:
            progress(waits.pop())

    token = _on_compile.set(tell)
    try:
        yield
    finally:
        _on_compile.reset(token)


def source_version() -> int:
    """A number that changes with the source of this folder.

    The key of a kernel's file covers only its own function and the values that this closes over.
    """
    files = sorted(Path(__file__).parent.glob("*.py"))
    return zlib.crc32(b"".join(file.read_bytes() for file in files))


class DamagedError(Exception):
    """A file of compiled code that must not be used, and why."""


class KernelCache(caching.Cache):
    """Keeps the compiled forms of one function. Implements the interface that numba's functions call.

    A form is read from the first folder that has it and written to the first folder that takes it. No file
    can make this fail: what cannot be used is compiled again, what cannot be written is not kept.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        # The base class is needed for `_index_key` alone: its __init__ demands a writable folder.
        self._py_func = function
        source = Path(inspect.getfile(function))
        own = f"{source.parent.name}_{hashlib.sha256(str(source.parent).encode()).hexdigest()[:16]}"
        self._folders = [source.parent / "__pycache__", Path(AppDirs(appname="legato").user_cache_dir) / own]
        if numba.config.CACHE_DIR:
            self._folders.insert(0, Path(numba.config.CACHE_DIR) / own)
        self._stem = f"{source.stem}.{function.__qualname__}".replace("<", "").replace(">", "")
        self.problem: str | None = None
        """Why a compiled form could not be kept; None if all of them are."""

    @property
    def cache_path(self) -> str:
        return str(self._folders[0])

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def flush(self) -> None: ...

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled form for a signature, or None."""
        target_context.refresh()
        name = self._file_name(sig, target_context.codegen())
        for folder in self._folders:
            try:
                content = read_checked(folder / name)
                return CompileResult._rebuild(target_context, *loads(content))
            except FileNotFoundError:
                continue
            except (NotADirectoryError, PermissionError):
                continue
            except OSError as error:
                reason = error.strerror or str(error)
            except DamagedError as error:
                reason = str(error)
            except Exception as error:  # whole, yet made by libraries that kept other things in it
                reason = f"it cannot be decoded ({type(error).__name__}: {error})"
            logger.warning("compiled kernel %s: %s; compiling it again", folder / name, reason)
        _on_compile.get()()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled form."""
        name = self._file_name(sig, data.codegen)
        content = dumps(data._reduce())
        problems = []
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_checked(folder / name, content)
            except OSError as error:
                problems.append(f"{folder}: {error.strerror or error}")
                continue
            self._drop_old(folder)
            return
        self.problem = "; ".join(problems)

    def _file_name(self, sig: Any, codegen: Any) -> str:
        versions = numba.__version__, llvmlite.__version__, sys.implementation.cache_tag
        key = repr((self._index_key(sig, codegen), versions))
        return f"{self._stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.kernel"

    def _drop_old(self, folder: Path) -> None:
        with suppress(OSError):  # another process may drop the same files
            files = sorted(folder.glob(f"{self._stem}-*.kernel"), key=lambda file: file.stat().st_mtime)
            for file in files[:-KEPT_VERSIONS]:
                file.unlink()


def read_checked(path: Path) -> bytes:
    """What `write_checked` wrote. Raises `DamagedError` if it is anything else, and `OSError`."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_uid not in (0, os.geteuid()):
            raise DamagedError("it belongs to another user")
        content = file.read()
    header = len(MAGIC) + hashlib.sha256().digest_size
    if not content.startswith(MAGIC):
        raise DamagedError("it is empty" if not content else "it is not a file of compiled code")
    if hashlib.sha256(content[header:]).digest() != content[len(MAGIC) : header]:
        raise DamagedError("it is damaged: its SHA-256 differs")
    return content[header:]


def write_checked(path: Path, content: bytes) -> None:
    """Whole or not at all. Raises `OSError`."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC + hashlib.sha256(content).digest() + content)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise


class Kernel:
    """A compiled function, and the work that it shares with a thread pool."""

    def __init__(self, entry: Any, work: Callable[[int, int], None] | None) -> None:
        """`entry(threads, work, ..)`: `work` is the address of the compiled `work(context, worker)`.

        Both are kept in NUMBA_CACHE_DIR, beside the source, or in the user's cache.
        """
        self._entry = entry
        self._caches = [KernelCache(entry.py_func)]
        entry._cache = self._caches[0]
        self._work: CFunc | None = None
        self._address = 0
        if work is not None:
            self._caches.append(KernelCache(work))
            signature = sigutils.normalize_signature(types.void(types.int64, types.int64))
            self._work = CFunc(work, signature, locals={}, options={})
            self._work._cache = self._caches[1]
            self._work.compile()
            self._address = self._work.address or 0

    def __call__(self, threads: Any, *arguments: Any) -> None:
        self._entry(threads, self._address, *arguments)

    def close(self) -> None:
        """From here on another type of argument is an error, and not seconds of compiling in a request."""
        self._entry.disable_compile()

    @property
    def problem(self) -> str | None:
        """Why the next start has to compile this again; None if it need not. Known after the first call."""
        return next((cache.problem for cache in self._caches if cache.problem), None)

    @property
    def num_cache_hits(self) -> int:
        """How much of it was not compiled but loaded."""
        work = 0 if self._work is None else self._work.cache_hits
        return int(sum(self._entry.stats.cache_hits.values()) + work)
