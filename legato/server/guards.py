"""What stands before every route: the API key, and the size and encoding of a request's body.

Both are ASGI middleware, so a route that is added later is guarded without a word about it. They know
nothing of routes but the few paths that are open to all.
"""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.errors import AuthenticationError, BodyTooLargeError, ConfigError, MediaTypeError
from legato.server.failures import error_response

ALIVE_PATHS = ("/health", "/ping")
"""What asks whether the server lives."""
OPEN_PATHS = (*ALIVE_PATHS, "/ready")
"""What a load balancer asks without a key: exactly these, with GET or HEAD."""


class ApiKeys:
    """The keys that open the server. Only their digests are kept, so no dump or traceback can show one."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Raises `ConfigError` for a key that cannot stand in a header; the message does not show it."""
        keys = list(keys)
        for key in keys:
            if not key or not all("!" <= char <= "~" for char in key):
                raise ConfigError(
                    "an API key must be of printable ASCII characters without spaces", param="api_key"
                )
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._digests)

    def admits(self, authorization: bytes) -> bool:
        """Whether an `Authorization` header brings one of the keys. Its time depends on none of them."""
        scheme, _, sent = authorization.partition(b" ")
        digest = _digest(sent.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class KeyGuard:
    """Lets in who brings a key. Everything else is 401, whether or not there is such a path."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) == 1 and self._keys.admits(sent[0]):
            await self._app(scope, receive, send)
            return
        problem = "the API key is wrong" if sent else "no API key"
        error = AuthenticationError(f"{problem}: send it as Authorization: Bearer KEY")
        await error_response(error, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)


class BodyLimit:
    """Refuses a body that is too large: unread where its length is told, else as soon as it shows. Refuses a
    compressed one unread: it may become any size."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if any(coding.lower() not in ("", "identity") for coding in _codings(headers)):
            error = MediaTypeError("the body has a Content-Encoding; only bodies as they are can be read")
            await error_response(error, headers={"Accept-Encoding": "identity"})(scope, receive, send)
            return
        told = headers.get("Content-Length", "0")
        if told.isdecimal() and (len(told) > 18 or int(told) > self._max_bytes):
            await error_response(self._too_large())(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body has more than {self._max_bytes} bytes, the most possible")


def _codings(headers: Headers) -> list[str]:
    return [coding.strip() for value in headers.getlist("Content-Encoding") for coding in value.split(",")]
