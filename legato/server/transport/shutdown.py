"""The shutdown of a server: signals, and the time that each part may take.

The first SIGTERM or SIGINT lets running replies finish, the second stops at once. SIGHUP always lets them
finish. Whatever threads do, the process ends when its time has passed.
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

MIN_SHUTDOWN_S = 1.0
"""Seconds that a shutdown may take whatever the settings say, and seconds left after a second signal."""


class Shutdown:
    """A request to stop. The first lets running replies finish, the second stops at once."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.urgent = asyncio.Event()

    def drain(self) -> None:
        """Let running replies finish, however often it is called. Call it in the event loop's thread."""
        self.requested.set()

    def request(self) -> None:
        """Call it in the event loop's thread."""
        (self.urgent if self.requested.is_set() else self.requested).set()


class ShutdownTimes:
    """The seconds that each part of a shutdown may take, for a `timeout` from the request to the exit."""

    def __init__(self, timeout: float) -> None:
        self.total = max(timeout, MIN_SHUTDOWN_S)
        closing = min(max(self.total / 10, MIN_SHUTDOWN_S / 2), 2 * MIN_SHUTDOWN_S)
        self.replies = min(timeout, self.total - closing)
        """For running replies."""
        self.step = (self.total - self.replies) / 3
        """For the step in flight, after the replies were aborted."""
        self.flush = self.step
        """For clients to read what was sent to them."""


@contextmanager
def signals(shutdown: Shutdown, timeout: float) -> Iterator[None]:
    """Pass each signal on to `shutdown`, and end the process when its time has passed.

    The process ends `timeout` seconds after the first signal, or one second after the second. Only the main
    thread can handle signals; in any other thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    num_signals = 0
    """Counted here and not in `shutdown`, because the event loop may be what hangs."""

    # Not asyncio's signal handlers, for the same reason.
    def drain(*_: object) -> None:
        nonlocal num_signals
        if num_signals == 0:
            _exit_after(ShutdownTimes(timeout).total)
            num_signals = 1
        loop.call_soon_threadsafe(shutdown.drain)

    def request(*_: object) -> None:
        nonlocal num_signals
        if num_signals < 2:  # Further signals do not postpone the exit.
            _exit_after(MIN_SHUTDOWN_S if num_signals else ShutdownTimes(timeout).total)
            num_signals += 1
        loop.call_soon_threadsafe(shutdown.request)

    handlers = {signal.SIGTERM: request, signal.SIGINT: request}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = drain  # nohup ignores it.
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_process() -> None:
    """End a process whose server has ended, without waiting for threads that still work.

    An interpreter that exits waits for the threads of executors, and native code that still runs while the
    interpreter is torn down may crash. So this does not return if any other thread is alive.
    """
    alive = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if alive:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    faulthandler.cancel_dump_traceback_later()


def _exit_after(seconds: float) -> None:
    """Print the stacks of all threads and exit, from a C thread that needs no interpreter lock."""
    faulthandler.dump_traceback_later(seconds, exit=True)
