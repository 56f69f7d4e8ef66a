"""Ctrl-C while libraries are imported."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """While libraries are imported, Ctrl-C ends the process at once: the exception that it is otherwise is
    swallowed by some of them, which are broken from then on (torch's C code, as it imports numpy). A process
    that ignores Ctrl-C goes on ignoring it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
