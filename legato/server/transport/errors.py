"""Exceptions as HTTP responses with OpenAI's error body: {"error": {"message", "type", "param", "code"}}.

Handles the exceptions of `legato.errors` and those of the web framework. Any other exception is a bug in
Legato: it is logged, and the client learns nothing about it.
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

REFUSAL_KEY = "legato.refusal"
"""The key of an ASGI scope under which the reason of a refusal is stored, for the metrics."""
RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client has disconnected. It appears only in logs and metrics."""


def error_body(error: LegatoError) -> dict[str, object]:
    return {
        "error": {
            "message": _encodable(error.message),
            "type": error.type,
            "param": None if error.param is None else _encodable(error.param),
            "code": error.code,
        }
    }


def _encodable(text: str) -> str:
    """Replace lone surrogates. An error may quote a chat template, which can produce them."""
    return text.encode(errors="replace").decode()


class ErrorResponse(JSONResponse):
    """Stores the reason of the refusal in the scope, for the metrics."""

    def __init__(self, error: LegatoError, *, status: int, headers: Mapping[str, str] | None) -> None:
        super().__init__(error_body(error), status_code=status, headers=headers)
        self._reason = _reason(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REFUSAL_KEY] = self._reason
        await super().__call__(scope, receive, send)


def _reason(error: LegatoError) -> str:
    """The value of the metrics' `reason` label."""
    if error.code is not None:
        return error.code
    if isinstance(error, UnavailableError):
        return "unavailable"
    return "invalid_request" if isinstance(error, RequestError) else "server_error"


def error_response(error: LegatoError, *, headers: dict[str, str] | None = None) -> Response:
    if isinstance(error, UnavailableError):
        # A new connection may reach another server behind a load balancer.
        headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
    elif isinstance(error, QueueFullError):
        headers = {"Retry-After": str(error.retry_after_s)}
    elif isinstance(error, DeadlineError):
        headers = {"X-Should-Retry": "false"}  # OpenAI's clients would retry although their user gave up.
    return ErrorResponse(error, status=error.status, headers=headers)


def to_client_error(error: Exception) -> LegatoError:
    """The error that the client may see. Logs a bug, so call it in the `except` block that caught `error`."""
    if isinstance(error, LegatoError):
        return error
    logger.exception("a request failed")
    return LegatoError("internal server error")


def log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # noqa: ARG001
    """For `loop.set_exception_handler`: log an exception that no task or callback handled.

    asyncio's own handler logs the `repr` of tasks and callbacks with their arguments, which may contain a
    prompt.
    """
    where = "an error in a callback" if "handle" in context else context["message"]
    logger.error("%s", where, exc_info=context.get("exception"))


def install_error_handlers(app: FastAPI, paths: Collection[str]) -> None:
    """Answer every exception of an endpoint. `paths` are the paths of all routes."""

    async def http_error(request: Request, error: Exception) -> Response:
        """Only the router raises it, for an unknown path or method."""
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            suggestion = nearest_path(request.url.path, paths)
            hint = f"; there is {suggestion}" if suggestion else ""
            return error_response(NotFoundError(f"no such path{hint}", code="not_found"))
        refused = RequestError(f"{request.method[:20]} is not possible here", code="method_not_allowed")
        return ErrorResponse(refused, status=error.status_code, headers=error.headers)

    app.add_exception_handler(LegatoError, _legato_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, _client_disconnected)


async def _legato_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return error_response(to_client_error(error))


def nearest_path(path: str, paths: Collection[str]) -> str | None:
    """The path that was probably meant. It differs only in slashes, or in a prefix as after a wrong base
    URL."""
    requested = "/" + "/".join(filter(None, path.split("/")))
    fits = [
        each for each in paths if requested.endswith(each) or (requested != "/" and each.endswith(requested))
    ]
    return min((each for each in fits if each), key=len, default=None)


async def _client_disconnected(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=CLIENT_CLOSED_REQUEST)
