"""Accepts connections, a few in each turn of the event loop, and stops before file descriptors run out.

A process without a free descriptor can open no file and start no process, and its listening socket stays
ready, so asyncio's own accept loop would spin. Therefore the soft limit is raised at the start, a reserve is
kept for the server itself, and new connections wait in the kernel's queue while the limit is reached.
"""

import asyncio
import errno
import logging
import os
import socket
import sys
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS = 65_536
"""The soft limit is never raised above this: some systems have a hard limit of a billion."""
RESERVE = 64
"""Descriptors that connections never use: files, pipes and processes that the server opens while it runs."""
MAX_ACCEPTED = 16
"""The most connections that one turn of the event loop accepts."""
PAUSE_S = 0.1
"""Seconds without accepting after the limit was reached."""
LOG_INTERVAL_S = 1.0
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptor_limit() -> int:
    """Raise the limit of open files of this process as far as possible, and return the limit in force."""
    if sys.platform == "win32":
        return MAX_DESCRIPTORS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS refuses more than the kernel's own limit.
        return soft
    return wanted


def max_connections(limit: int) -> int:
    """The number of connections that fit beside the open files and the reserve. At least 1."""
    return max(limit - _num_open() - RESERVE, 1)


def _num_open() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return RESERVE


class Acceptor:
    """Accepts from a listening socket while there is room. It has the methods that uvicorn calls on a
    server."""

    def __init__(
        self,
        listener: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
        *,
        num_connections: Callable[[], int],
        make_room: Callable[[], int],
        max_connections: int,
    ) -> None:
        """`num_connections` returns how many connections are open. `make_room` closes idle connections and
        returns how many it closed."""
        self._listener = listener
        self._new_protocol = new_protocol
        self._num_connections = num_connections
        self._make_room = make_room
        self._max_connections = max_connections
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()
        """Accepted connections that have no protocol yet."""
        self._pause: asyncio.TimerHandle | None = None
        self._logged = -LOG_INTERVAL_S
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Return at once: uvicorn itself waits for the connections."""

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept some of the connections that wait."""
        if not self._has_room:
            num_closed = self._make_room()
            idle = f"; {num_closed} idle ones are closed" if num_closed else ""
            self._wait(f"{self._max_connections} connections are open, the most possible{idle}")
            return
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in NO_DESCRIPTOR:
                    self._make_room()
                self._wait(f"no connection can be accepted: {error.strerror}")
                return
            connection.setblocking(False)
            self._open(connection)
            if not self._has_room:
                return

    @property
    def _has_room(self) -> bool:
        return self._num_connections() + len(self._opening) < self._max_connections

    def _open(self, connection: socket.socket) -> None:
        opening = self._loop.create_task(self._loop.connect_accepted_socket(self._new_protocol, connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and (error := opening.exception()) is not None:
            logger.error("a connection could not be opened: %s", error)

    def _wait(self, reason: str) -> None:
        """Leave new connections in the kernel's queue for a moment."""
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(PAUSE_S, self._resume)
        now = self._loop.time()
        if now >= self._logged + LOG_INTERVAL_S:
            self._logged = now
            logger.warning("%s; new connections wait", reason)
