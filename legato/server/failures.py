"""Every way to fail, as OpenAI's error body: {"error": {"message", "type", "param", "code"}}.

Knows the tree of `legato.errors` and the web framework's own exceptions. An exception of any other kind is a
bug of ours: it is logged, and the client learns nothing of it.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from legato.errors import (
    DeadlineError,
    LegatoError,
    NotFoundError,
    QueueFullError,
    RequestError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

REFUSAL = "legato.refusal"
"""Key of a scope."""
RETRY_AFTER_S = 1
CLIENT_GONE = 499
"""nginx's status for an answer that nobody waits for any more; it is only ever logged."""


def error_body(error: LegatoError) -> dict[str, object]:
    return {
        "error": {
            "message": _text(error.message),
            "type": error.type,
            "param": None if error.param is None else _text(error.param),
            "code": error.code,
        }
    }


def _text(text: str) -> str:
    """An error may quote a chat template, which can write a lone surrogate."""
    return text.encode(errors="replace").decode()


class ErrorResponse(JSONResponse):
    """Leaves in the scope why the request was refused, for the metrics."""

    def __init__(self, error: LegatoError, *, status: int, headers: Mapping[str, str] | None) -> None:
        super().__init__(error_body(error), status_code=status, headers=headers)
        self._reason = _reason(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REFUSAL] = self._reason
        await super().__call__(scope, receive, send)


def _reason(error: LegatoError) -> str:
    """One word for the metrics."""
    if error.code is not None:
        return error.code
    if isinstance(error, UnavailableError):
        return "unavailable"
    return "invalid_request" if isinstance(error, RequestError) else "server_error"


def error_response(error: LegatoError, *, headers: dict[str, str] | None = None) -> Response:
    if isinstance(error, UnavailableError):
        # Another connection may lead to another server, which takes requests.
        headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
    elif isinstance(error, QueueFullError):
        headers = {"Retry-After": str(error.retry_after_s)}
    elif isinstance(error, DeadlineError):
        headers = {"X-Should-Retry": "false"}  # OpenAI's clients would try again, with nobody waiting
    return ErrorResponse(error, status=error.status, headers=headers)


def known(error: Exception) -> LegatoError:
    """An error that a client may see. Call it in the `except` that caught `error`."""
    if isinstance(error, LegatoError):
        return error
    logger.exception("a request failed")
    return LegatoError("internal server error")


def log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # noqa: ARG001
    """For `loop.set_exception_handler`: an error that no task or callback took. By itself asyncio logs the
    `repr` of tasks and of callbacks with their arguments, which may hold a prompt."""
    where = "an error in a callback" if "handle" in context else context["message"]
    logger.error("%s", where, exc_info=context.get("exception"))


def install(app: FastAPI, paths: Collection[str]) -> None:
    """Answer every exception of an endpoint. `paths` are those of all routes."""

    async def http_error(request: Request, error: Exception) -> Response:
        """Raised by the router alone: an unknown path or method."""
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            meant = nearest(request.url.path, paths)
            hint = f"; there is {meant}" if meant else ""
            return error_response(NotFoundError(f"no such path{hint}", code="not_found"))
        refused = RequestError(f"{request.method[:20]} is not possible here", code="method_not_allowed")
        return ErrorResponse(refused, status=error.status_code, headers=error.headers)

    app.add_exception_handler(LegatoError, _legato_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)


async def _legato_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return error_response(known(error))


def nearest(path: str, paths: Collection[str]) -> str | None:
    """The one of `paths` that may have been meant: the same but for slashes, or with less or more
    before it, as clients make of a wrong base URL."""
    asked = "/" + "/".join(filter(None, path.split("/")))
    fits = [each for each in paths if asked.endswith(each) or (asked != "/" and each.endswith(asked))]
    return min((each for each in fits if each), key=len, default=None)


async def _client_gone(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=CLIENT_GONE)
