"""The outermost layer: gives every response a request id, every bug an answer, every request a line in the
access log and a place in the metrics.

A client's id is a label to be echoed; nothing inside uses it, so it need not be unique.
"""

import asyncio
import logging
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.metrics.http_series import NO_ROUTE, HttpSeries
from legato.server.failures import CLIENT_GONE, REFUSAL, error_response, known

HEADER = "X-Request-ID"
MAX_ID_CHARS = 128
MAX_PATH_CHARS = 200
"""Of a path in the log."""

access = logging.getLogger("legato.access")


class Entrance:
    """ASGI middleware. Paths go to the log as they came: its formatter escapes them. Query strings do not go
    there: some clients put keys into them."""

    def __init__(self, app: ASGIApp, http: HttpSeries, access_log: bool) -> None:
        self._app = app
        self._http = http
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _label(Headers(scope=scope).get(HEADER, "")) or f"req-{secrets.token_hex(12)}"
        began = time.monotonic()
        status: int | None = None

        async def labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
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
            if status is not None:
                raise  # the server closes the connection: a cut answer must not look complete
            await response(scope, receive, labelled)
        finally:
            ended = CLIENT_GONE if status is None else status
            self._http.ended(
                route=getattr(scope.get("route"), "path_format", NO_ROUTE),
                method=scope["method"],
                status=ended,
                refusal=scope.get(REFUSAL),
            )
            if self._access_log:
                _log(scope, ended, time.monotonic() - began, request_id)


def _label(sent: str) -> str:
    return "".join(char for char in sent[:MAX_ID_CHARS] if " " <= char <= "~").strip()


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
