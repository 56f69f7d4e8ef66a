"""What is compiled is kept on disk, and compiled again when its source changes."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import types

Progress = Callable[[str], None]


def source_version() -> int:
    """Stands for the source of this folder.

    numba's cache notices changes only in the file of the cached function, and in values that it closes over.
    """
    files = sorted(Path(__file__).parent.glob("*.py"))
    return zlib.crc32(b"".join(file.read_bytes() for file in files))


class Kernel:
    """A compiled function, and the work that it shares with a team."""

    def __init__(
        self, entry: Any, work: Callable[[int, int], None] | None, progress: Progress = lambda _: None
    ) -> None:
        """`entry(team, work, ..)`: `work` is the address of the compiled `work(context, worker)`.

        Both are kept where numba keeps things: NUMBA_CACHE_DIR, beside the source, or the user's cache.
        """
        self._entry = entry
        self._work: Any = None
        signature = types.void(types.int64, types.int64)
        try:
            entry.enable_caching()
            self._work = None if work is None else numba.cfunc(signature, cache=True)(work)
        except RuntimeError:
            progress("no directory is writable for compiled kernels: every start compiles them")
            self._work = None if work is None else numba.cfunc(signature)(work)
        self._address = 0 if self._work is None else self._work.address

    def __call__(self, team: Any, *arguments: Any) -> None:
        self._entry(team, self._address, *arguments)

    def close(self) -> None:
        """From here on another type of argument is an error, and not seconds of compiling in a request."""
        self._entry.disable_compile()

    @property
    def num_cache_hits(self) -> int:
        """How much of it was not compiled but loaded."""
        work = 0 if self._work is None else self._work.cache_hits
        return int(sum(self._entry.stats.cache_hits.values()) + work)
