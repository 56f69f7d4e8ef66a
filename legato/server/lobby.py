"""Answers a server's address while its model loads: 503 and when to come again, to everyone but those who ask
whether it lives.

So a server that loads can be told from one that is not there. What replaces a server that does not live
(`/health`) gives it the time that it needs, and `/ready` keeps requests away. It runs in a thread of its own
and leaves the listening socket to the server: whoever connects in between waits for a moment and is served.
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
from legato.server.entrance import Entrance
from legato.server.failures import error_response
from legato.server.guards import ALIVE_PATHS
from legato.server.run import Silent, http_config, listen


@contextmanager
def lobby(listener: socket.socket) -> Iterator[None]:
    """Answer on `listener` (see `bind`) until the block is left. Raises `ConfigError` if someone else listens
    there by now."""
    listen(listener)
    server = Silent(http_config(Entrance(_loading, HttpSeries(), access_log=False), flush=1))
    shared = listener.dup()  # uvicorn closes what it is given
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[shared])), name="legato-lobby", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] in ALIVE_PATHS and scope["method"] in ("GET", "HEAD"):
        await JSONResponse({"status": "loading"})(scope, receive, send)
        return
    await error_response(UnavailableError("the server is loading"))(scope, receive, send)
