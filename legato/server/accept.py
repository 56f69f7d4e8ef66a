"""Accepts connections, a few in each turn of the event loop, and stops before file descriptors run out.

A process without a free descriptor can open no file and start no process, and its listening socket stays
ready: asyncio's own accept loop then runs in circles. So the soft limit is raised at the start, a reserve is
kept for the server itself, and while the limit is reached new connections wait in the kernel's queue.
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
"""The soft limit is not raised above this: some systems have a hard limit of a thousand million."""
RESERVE = 64
"""Descriptors that connections never take: files, pipes and processes that the server opens while it runs."""
ACCEPTED_AT_ONCE = 16
"""In one turn of the event loop."""
PAUSE_S = 0.1
"""How long nothing is accepted once the limit is reached."""
LOG_EVERY_S = 1.0
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as it may be, and return the limit in force."""
    if sys.platform == "win32":
        return MAX_DESCRIPTORS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS refuses more than the kernel's own limit
        return soft
    return wanted


def max_connections(limit: int) -> int:
    """How many connections fit beside the files that are open now and the reserve; at least 1."""
    return max(limit - _num_open() - RESERVE, 1)


def _num_open() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return RESERVE


class Acceptor:
    """Accepts from a listening socket while there is room. Has the methods that uvicorn calls on a server."""

    def __init__(
        self,
        listener: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
        *,
        num_connections: Callable[[], int],
        make_room: Callable[[], int],
        max_connections: int,
    ) -> None:
        """`num_connections` tells how many are open. `make_room` closes connections on which nothing is being
        asked or answered, and tells how many it closed."""
        self._listener = listener
        self._new_protocol = new_protocol
        self._num_connections = num_connections
        self._make_room = make_room
        self._max_connections = max_connections
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()
        """Connections that were accepted and have no protocol yet."""
        self._pause: asyncio.TimerHandle | None = None
        self._logged = -LOG_EVERY_S
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept nothing more."""
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
            closed = self._make_room()
            idle = f"; {closed} idle ones are closed" if closed else ""
            self._wait(f"{self._max_connections} connections are open, the most possible{idle}")
            return
        for _ in range(ACCEPTED_AT_ONCE):
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
        """Let new connections wait in the kernel's queue for a while."""
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(PAUSE_S, self._resume)
        now = self._loop.time()
        if now >= self._logged + LOG_EVERY_S:
            self._logged = now
            logger.warning("%s; new connections wait", reason)
