"""Protects a server without an API key that listens on a loopback address from web pages.

Every web page that the user opens can send requests there. Two headers tell pages from the user's programs:

- `Host`: a page can let its own name resolve to 127.0.0.1 and then read the responses (DNS rebinding). Such a
  name is public and contains a dot. Addresses and local names cannot be rebound.
- `Origin`: browsers send it with every request of a page that is not a plain link or image, even if the page
  cannot read the response. Programs do not send it.
"""

import ipaddress
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from legato.errors import ForbiddenError
from legato.server.transport.errors import error_response

LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""No public name ends in one of these."""


def is_loopback(host: str) -> bool:
    """Whether a host name or an address means this machine and cannot be reached from another one."""
    host = host.strip("[]").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback


class LoopbackGuardMiddleware:
    """Answers 403 to requests that a web page of another host may have sent."""

    def __init__(
        self, app: ASGIApp, *, allowed_hosts: Collection[str], allowed_origins: Collection[str]
    ) -> None:
        """`allowed_hosts` are further names of this server, `allowed_origins` other pages. * allows any."""
        self._app = app
        self._hosts = {host.lower() for host in allowed_hosts}
        self._origins = {*allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [*_values(scope, b"host")]
        problem = None
        if not all(map(self._admits_host, hosts)):
            problem = "the header Host has a name that this server does not know: see --allowed-hosts"
        elif not all(self._admits_origin(origin, hosts) for origin in _values(scope, b"origin")):
            problem = "requests of this web page are not allowed: see --allowed-origins"
        if problem is None:
            await self._app(scope, receive, send)
        else:
            error = ForbiddenError(f"{problem}, or start the server with a key (--api-key)")
            await error_response(error)(scope, receive, send)

    def _admits_host(self, header: str) -> bool:
        if "*" in self._hosts:
            return True
        host = _without_port(header)
        if host in self._hosts or _address(host) is not None:
            return True
        return "." not in host or host.endswith(LOCAL_SUFFIXES)

    def _admits_origin(self, origin: str, hosts: Collection[str]) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        try:
            parts = urlsplit(origin)
            host = parts.hostname or ""
        except ValueError:
            return False
        if origin == "null" or not parts.scheme:
            return False
        if parts.scheme not in ("http", "https"):
            return True  # A program or a browser extension: no web page has such an origin.
        return is_loopback(host) or parts.netloc.lower() in [host.lower() for host in hosts]


def _values(scope: Scope, name: bytes) -> Iterable[str]:
    return (value.decode("latin-1").strip() for key, value in scope["headers"] if key == name)


def _without_port(host: str) -> str:
    """The name or the address in a `Host` header."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.rstrip(".").lower()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
