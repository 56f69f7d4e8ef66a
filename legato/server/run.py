"""Serves an application until it is told to stop: socket, signals, start and orderly end.

The order of an end: new requests are refused; running replies get time to finish; what is left is aborted;
the engine stops; then the connections close.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from legato.errors import ConfigError
from legato.server.accept import Acceptor, max_connections, raise_descriptor_limit
from legato.server.app import create_app
from legato.server.connection import Connection, close_idle
from legato.server.failures import log_unhandled
from legato.server.service import Service
from legato.server.shutdown import Schedule, Shutdown, signals

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
"""Longer than clients and proxies keep idle connections in their pools; else they send into closed ones."""
SEND_S = 60.0
RECEIVE_S = 120.0
WATCH_S = 1.0
BACKLOG = 2048


async def serve(
    service: Service,
    listener: socket.socket,
    *,
    on_ready: Callable[[str], None],
    shutdown: Shutdown | None = None,
    shutdown_timeout: float = 30.0,
    keep_alive: float = KEEP_ALIVE_S,
    send_timeout: float = SEND_S,
    receive_timeout: float = RECEIVE_S,
) -> None:
    """Serve on `listener` (see `bind`) until a signal or `shutdown`; then return.

    `on_ready` gets one line with the address once requests are answered. The whole end takes at most
    `shutdown_timeout` seconds, most of which running replies get to finish; idle connections stay open for
    `keep_alive` seconds; a client that takes nothing sent to it for `send_timeout` seconds is dropped, and
    one that takes more than `receive_timeout` seconds to send a request. Raises `ConfigError` if someone else
    listens there by now.
    """
    listen(listener)
    shutdown = shutdown or Shutdown()
    config = http_config(
        create_app(service),
        keep_alive=keep_alive,
        send_timeout=send_timeout,
        receive_timeout=receive_timeout,
        flush=Schedule(shutdown_timeout).flush,
    )
    server = _Server(config, lambda: on_ready(f"Legato is ready on {url_of(listener)}"))
    await service.engine.start()
    service.readiness.ready()
    with signals(shutdown, shutdown_timeout):
        ending = asyncio.create_task(_end(service, shutdown, shutdown_timeout, server))
        watching = asyncio.create_task(_watch(service))
        try:
            await server.serve(sockets=[listener])
        finally:
            ending.cancel()
            watching.cancel()
            await service.engine.stop(patience_s=0)


def http_config(
    app: ASGIApp,
    *,
    flush: float,
    keep_alive: float = KEEP_ALIVE_S,
    send_timeout: float = SEND_S,
    receive_timeout: float = RECEIVE_S,
) -> uvicorn.Config:
    """HTTP for `app`, all times in seconds."""
    return uvicorn.Config(
        app,
        http=partial(Connection, send_timeout, receive_timeout),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]
        timeout_graceful_shutdown=flush,  # type: ignore[arg-type]
    )


async def _end(service: Service, shutdown: Shutdown, timeout: float, server: "_Server") -> None:
    await shutdown.asked.wait()
    schedule = Schedule(timeout)
    service.readiness.drain()
    if service.engine.num_streams:
        logger.info(
            "stopping: %d replies get %g s to finish; ask again to stop at once",
            service.engine.num_streams,
            schedule.replies,
        )
    await _unless(shutdown.urgent, service.engine.drain(), schedule.replies)
    await _unless(shutdown.urgent, service.engine.stop(schedule.step), schedule.step)
    service.engine.end_streams()
    server.should_exit = True


async def _watch(service: Service) -> None:
    """Tell the log what /health tells those who ask."""
    stuck = False
    while service.engine.failure is None:
        trouble = service.engine.trouble
        if trouble is not None and not stuck:
            logger.error("%s\n%s", trouble, service.engine.place)
        elif trouble is None and stuck:
            logger.warning("the engine goes on")
        stuck = trouble is not None
        await asyncio.sleep(WATCH_S)


async def _unless(urgent: asyncio.Event, work: Coroutine[None, None, None], timeout: float) -> None:
    """Do `work` until it is done, time is out, or it is urgent to stop."""
    waits = [asyncio.ensure_future(work), asyncio.ensure_future(urgent.wait())]
    await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


class Silent(uvicorn.Server):
    """uvicorn without its own signal handling, which refuses connections before the replies are done, and
    without asyncio's accept loop."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(log_unhandled)
        await self.lifespan.startup()
        connection: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        new_protocol = partial(
            connection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        most = max_connections(raise_descriptor_limit())
        connections = self.server_state.connections
        self.servers = [
            Acceptor(  # type: ignore[misc]
                listener,
                new_protocol,
                num_connections=lambda: len(connections),
                make_room=lambda: close_idle(connections),  # type: ignore[arg-type]
                max_connections=most,
            )
            for listener in sockets or ()
        ]
        self.started = True


class _Server(Silent):
    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address, and refuses connections until it is served on.

    Port 0 takes a free one. Raises `ConfigError` if the address cannot be used.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} is not in 0..65535", param="port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol has to be named: asyncio turns Nagle's delay off only for sockets that say TCP, and with
    # it a chunk on a reused connection waits 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        with _naming(host, port):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except ConfigError:
        listener.close()
        raise
    return listener


def listen(listener: socket.socket) -> None:
    """Let clients connect. Raises `ConfigError` if someone else listens there by now."""
    if listener.family == socket.AF_UNIX:
        return  # it does, from its creation on
    with _naming(*listener.getsockname()[:2]):
        listener.listen(BACKLOG)


def url_of(listener: socket.socket) -> str:
    """Where clients find a server that listens there."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _naming(host: str, port: int) -> Iterator[None]:
    """An address that cannot be used is a `ConfigError` that names it, and the setting that is wrong."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:  # the last two: a name that no host can have
        reason = getattr(error, "strerror", None) or error
        of_port = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}", param="port" if of_port else "host"
        ) from None
