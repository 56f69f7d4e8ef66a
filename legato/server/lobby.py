"""Answers a server's address while its model loads: 503 and when to come again, to everyone.

So nobody has to tell a server that loads from one that is not there. It runs in a thread of its own and
leaves the listening socket to the server: whoever connects in between waits for a moment and is served.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Receive, Scope, Send

from legato.errors import UnavailableError
from legato.server.entrance import Entrance
from legato.server.failures import error_response
from legato.server.run import Silent, http_config, listen


@contextmanager
def lobby(listener: socket.socket) -> Iterator[None]:
    """Answer on `listener` (see `bind`) until the block is left. Raises `ConfigError` if someone else listens
    there by now."""
    listen(listener)
    server = Silent(http_config(Entrance(_loading, access_log=False), flush=1))
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
    await error_response(UnavailableError("the server is loading"))(scope, receive, send)
