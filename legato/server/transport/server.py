"""Serves an ASGI application until it is asked to stop.

The order of a shutdown: new requests are refused; running replies get time to finish; the rest is aborted;
the engine stops; the connections close.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from legato.server.transport.acceptor import Acceptor, max_connections, raise_descriptor_limit
from legato.server.transport.connection import Connection, close_idle
from legato.server.transport.errors import log_unhandled
from legato.server.transport.shutdown import Shutdown, ShutdownTimes, signals
from legato.server.transport.sockets import listen, url_of

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
"""Longer than clients and proxies keep idle connections in their pools. Otherwise they would write into
closed ones."""
SEND_TIMEOUT_S = 60.0
RECEIVE_TIMEOUT_S = 120.0


class Lifecycle(Protocol):
    """The part that is started and stopped together with the server's connections."""

    @property
    def num_replies(self) -> int:
        """Replies in progress."""
        ...

    async def start(self) -> None:
        """Start, and take requests from now on."""
        ...

    def refuse_requests(self) -> None:
        """Refuse new requests from now on."""
        ...

    async def drain(self) -> None:
        """Wait until no reply is in progress."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """Abort every reply, and stop. Safe to call again."""
        ...

    def end_replies(self) -> None:
        """Tell every remaining reply that it is aborted. Call it after `stop`."""
        ...

    async def watch(self) -> None:
        """Log when replies stop making progress. Runs until it is cancelled."""
        ...


async def serve(
    app: ASGIApp,
    lifecycle: Lifecycle,
    listener: socket.socket,
    *,
    on_ready: Callable[[str], None],
    shutdown: Shutdown | None = None,
    shutdown_timeout: float = 30.0,
    keep_alive: float = KEEP_ALIVE_S,
    send_timeout: float = SEND_TIMEOUT_S,
    receive_timeout: float = RECEIVE_TIMEOUT_S,
) -> None:
    """Serve `app` on `listener` (see `sockets.bind`) until a signal or `shutdown`.

    `on_ready` is called with one line that contains the URL once requests are answered. All times are in
    seconds. The whole shutdown takes at most `shutdown_timeout`, most of which is for running replies. Idle
    connections stay open for `keep_alive`. A client is dropped if it reads nothing for `send_timeout`, or
    takes more than `receive_timeout` to send a request. Raises `ConfigError` if another process listens on
    the address by now.
    """
    listen(listener)
    shutdown = shutdown or Shutdown()
    config = http_config(
        app,
        keep_alive=keep_alive,
        send_timeout=send_timeout,
        receive_timeout=receive_timeout,
        flush_timeout=ShutdownTimes(shutdown_timeout).flush,
    )
    server = HttpServer(config, lambda: on_ready(f"Legato is ready on {url_of(listener)}"))
    await lifecycle.start()
    with signals(shutdown, shutdown_timeout):
        ending = asyncio.create_task(_shut_down(lifecycle, shutdown, shutdown_timeout, server))
        watching = asyncio.create_task(lifecycle.watch())
        try:
            await server.serve(sockets=[listener])
        finally:
            ending.cancel()
            watching.cancel()
            await lifecycle.stop(timeout_s=0)


def http_config(
    app: ASGIApp,
    *,
    flush_timeout: float,
    keep_alive: float = KEEP_ALIVE_S,
    send_timeout: float = SEND_TIMEOUT_S,
    receive_timeout: float = RECEIVE_TIMEOUT_S,
) -> uvicorn.Config:
    """uvicorn's settings for `app`. All times are in seconds."""
    return uvicorn.Config(
        app,
        http=partial(Connection, send_timeout, receive_timeout),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]
        timeout_graceful_shutdown=flush_timeout,  # type: ignore[arg-type]
    )


async def _shut_down(lifecycle: Lifecycle, shutdown: Shutdown, timeout: float, server: "HttpServer") -> None:
    await shutdown.requested.wait()
    times = ShutdownTimes(timeout)
    lifecycle.refuse_requests()
    if lifecycle.num_replies:
        logger.info(
            "stopping: %d replies get %g s to finish; a second signal stops at once",
            lifecycle.num_replies,
            times.replies,
        )
    await _run_unless_urgent(lifecycle.drain(), shutdown.urgent, times.replies)
    await _run_unless_urgent(lifecycle.stop(times.step), shutdown.urgent, times.step)
    lifecycle.end_replies()
    server.should_exit = True


async def _run_unless_urgent(
    work: Coroutine[None, None, None], urgent: asyncio.Event, timeout: float
) -> None:
    """Run `work` until it is done, `timeout` seconds have passed, or the shutdown becomes urgent."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(urgent.wait())]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, which refuses connections before replies are done, and without
    asyncio's accept loop."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_started = on_started

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(log_unhandled)
        await self.lifespan.startup()
        connection: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        new_protocol = partial(
            connection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        limit = max_connections(raise_descriptor_limit())
        connections = self.server_state.connections
        self.servers = [
            Acceptor(  # type: ignore[misc]
                listener,
                new_protocol,
                num_connections=lambda: len(connections),
                make_room=lambda: close_idle(connections),  # type: ignore[arg-type]
                max_connections=limit,
            )
            for listener in sockets or ()
        ]
        self.started = True
        self._on_started()
