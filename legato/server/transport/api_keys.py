"""API keys: a middleware that lets in requests with a key, and the paths that need none.

As ASGI middleware it stands before every route, including those that are added later.
"""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from legato.errors import AuthenticationError, ConfigError
from legato.server.transport.errors import error_response

LIVENESS_PATHS = ("/health", "/ping")
"""Paths of liveness probes."""
OPEN_PATHS = (*LIVENESS_PATHS, "/ready")
"""The paths that a load balancer may GET or HEAD without a key."""


class ApiKeys:
    """The accepted keys. Only their digests are kept, so that no dump or traceback can show a key."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Raises `ConfigError`, without the key, for a key that cannot be sent in a header."""
        keys = list(keys)
        for key in keys:
            if not key or not all("!" <= char <= "~" for char in key):
                raise ConfigError(
                    "an API key must consist of printable ASCII characters without spaces", param="api_key"
                )
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._digests)

    def admits(self, authorization: bytes) -> bool:
        """Whether an `Authorization` header contains one of the keys. The comparison takes constant time."""
        scheme, _, sent = authorization.partition(b" ")
        digest = _digest(sent.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ApiKeyMiddleware:
    """Answers 401 to requests without a valid key, whether or not their path exists."""

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
