"""The outermost layer: gives every response a request id, and every bug an answer.

A client's id is a label to be echoed; nothing inside uses it, so it need not be unique.
"""

import asyncio
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.server.failures import error_response, known

HEADER = "X-Request-ID"
MAX_ID_CHARS = 128


class Entrance:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _label(Headers(scope=scope).get(HEADER, "")) or f"req-{secrets.token_hex(12)}"
        started = False

        async def labelled(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, labelled)
        except asyncio.CancelledError:
            # Only the end of the server cancels a request: one whose body never came, or a reader that left
            # its answer lying. The connection is closed; there is nothing to tell and nobody to blame.
            return
        except Exception as error:
            response = error_response(known(error))
            if started:
                raise  # the server closes the connection: a cut answer must not look complete
            await response(scope, receive, labelled)


def _label(sent: str) -> str:
    return "".join(char for char in sent[:MAX_ID_CHARS] if " " <= char <= "~").strip()
