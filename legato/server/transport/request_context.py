"""The outermost middleware: request ids, the access log, HTTP metrics, and a response to every bug.

A client's request id is only echoed. Nothing depends on it, so it need not be unique.
"""

import asyncio
import logging
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.metrics.http_series import NO_ROUTE, HttpSeries
from legato.server.transport.errors import (
    CLIENT_CLOSED_REQUEST,
    REFUSAL_KEY,
    error_response,
    to_client_error,
)

REQUEST_ID_HEADER = "X-Request-ID"
MAX_ID_CHARS = 128
MAX_PATH_CHARS = 200
"""The most characters of a path in the log."""

access = logging.getLogger("legato.access")


class RequestContextMiddleware:
    """Logs paths as they were received; the log's formatter escapes them. Query strings are not logged,
    because some clients put API keys into them."""

    def __init__(self, app: ASGIApp, http: HttpSeries, access_log: bool) -> None:
        self._app = app
        self._http = http
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = (
            _printable(Headers(scope=scope).get(REQUEST_ID_HEADER, "")) or f"req-{secrets.token_hex(12)}"
        )
        began = time.monotonic()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # Only the shutdown of the server cancels a request: its body never arrived, or its client does
            # not read the response. The connection is closed, so no response is possible.
            return
        except Exception as error:
            response = error_response(to_client_error(error))
            if status is not None:
                raise  # The server closes the connection: an incomplete response must not look complete.
            await response(scope, receive, send_with_id)
        finally:
            final_status = CLIENT_CLOSED_REQUEST if status is None else status
            self._http.ended(
                route=getattr(scope.get("route"), "path_format", NO_ROUTE),
                method=scope["method"],
                status=final_status,
                refusal=scope.get(REFUSAL_KEY),
            )
            if self._access_log:
                _log(scope, final_status, time.monotonic() - began, request_id)


def _printable(text: str) -> str:
    return "".join(char for char in text[:MAX_ID_CHARS] if " " <= char <= "~").strip()


def _log(scope: Scope, status: int, seconds: float, request_id: str) -> None:
    fields = {
        "client": "{}:{}".format(*scope["client"]) if scope.get("client") else "",
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH_CHARS],
        "status": status,
        "seconds": round(seconds, 3),
        "request_id": request_id,
    }
    access.info(
        '%(client)s "%(method)s %(path)s" %(status)d %(seconds).3f s %(request_id)s',
        fields,
        extra={"fields": fields},
    )
