"""The end of a server: who asks for it, and how long each part of it may take.

SIGTERM and SIGINT ask twice: running replies may finish, then at once. SIGHUP only asks the first. Whatever
threads do, the process ends when the time for it has passed.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

LEAST_S = 1.0
"""Seconds that an end may take whatever the settings say, and those that a second signal leaves it."""


class Shutdown:
    """A request to stop. Asked once: let running replies finish. Asked again: stop at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()

    def drain(self) -> None:
        """Let running replies finish, however often it is asked. Call it in the event loop's thread."""
        self.asked.set()

    def ask(self) -> None:
        """Call it in the event loop's thread."""
        (self.urgent if self.asked.is_set() else self.asked).set()


class Schedule:
    """Which part of an end may take how long, in seconds, for a `timeout` from the request to the exit."""

    def __init__(self, timeout: float) -> None:
        self.whole = max(timeout, LEAST_S)
        closing = min(max(self.whole / 10, LEAST_S / 2), 2 * LEAST_S)
        self.replies = min(timeout, self.whole - closing)
        """For running replies."""
        self.step = (self.whole - self.replies) / 3
        """For the step in flight, after the replies were aborted."""
        self.flush = self.step
        """For clients to take what was sent to them."""


@contextmanager
def signals(shutdown: Shutdown, timeout: float) -> Iterator[None]:
    """Ask `shutdown` for each signal, and end the process if it does not end within `timeout` seconds of the
    first, or within a second of the next. Only a main thread can; elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    num_asked = 0
    """Signals that count. The event loop, which sets `shutdown.asked`, may be what hangs."""

    # Not asyncio's handlers, for the same reason.
    def drain(*_: object) -> None:
        nonlocal num_asked
        if num_asked == 0:
            _exit_after(Schedule(timeout).whole)
            num_asked = 1
        loop.call_soon_threadsafe(shutdown.drain)

    def ask(*_: object) -> None:
        nonlocal num_asked
        if num_asked < 2:  # further ones do not put the end off
            _exit_after(LEAST_S if num_asked else Schedule(timeout).whole)
            num_asked += 1
        loop.call_soon_threadsafe(shutdown.ask)

    handlers = {signal.SIGTERM: ask, signal.SIGINT: ask}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = drain  # under nohup it is ignored
    before = {kind: signal.signal(kind, handler) for kind, handler in handlers.items()}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def leave() -> None:
    """End a process whose server has ended. Threads that still work are not waited for.

    An interpreter that ends waits for every thread of an executor, and native code that runs on while it is
    taken apart may crash. So where a thread is left that cannot be waited for, this does not return.
    """
    busy = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if busy:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    faulthandler.cancel_dump_traceback_later()


def _exit_after(seconds: float) -> None:
    """In a thread of C code, which needs no interpreter lock: print where all threads are, and exit."""
    faulthandler.dump_traceback_later(seconds, exit=True)
