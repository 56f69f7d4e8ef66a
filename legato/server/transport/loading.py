"""Answers on the server's address while the model loads: 503 with Retry-After, and 200 to liveness probes.

So clients can tell a server that loads from one that is absent, liveness probes do not kill a loading
server, and `/ready` keeps traffic away. It runs in its own thread and leaves the listening socket to the
server. A client that connects in between waits for a moment and is then served.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from legato.errors import UnavailableError
from legato.metrics.http_series import HttpSeries
from legato.server.transport.api_keys import LIVENESS_PATHS
from legato.server.transport.errors import error_response
from legato.server.transport.request_context import RequestContextMiddleware
from legato.server.transport.server import HttpServer, http_config
from legato.server.transport.sockets import listen


@contextmanager
def loading_server(listener: socket.socket) -> Iterator[None]:
    """Answer on `listener` (see `sockets.bind`) until the block is left.

    Raises `ConfigError` if another process listens on the address by now.
    """
    listen(listener)
    app = RequestContextMiddleware(_loading, HttpSeries(), access_log=False)
    server = HttpServer(http_config(app, flush_timeout=1))
    shared = listener.dup()  # uvicorn closes the socket that it is given.
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[shared])), name="legato-loading", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] in LIVENESS_PATHS and scope["method"] in ("GET", "HEAD"):
        await JSONResponse({"status": "loading"})(scope, receive, send)
        return
    await error_response(UnavailableError("the server is loading"))(scope, receive, send)
