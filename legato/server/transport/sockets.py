"""TCP sockets to listen on."""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from legato.errors import ConfigError

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address. It refuses connections until `listen`.

    Port 0 selects a free port. Raises `ConfigError` if the address cannot be used.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} is not in 0..65535", param="port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol must be given: asyncio sets TCP_NODELAY only on sockets that name TCP. Without it, a chunk
    # on a reused connection waits 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        with _as_config_error(host, port):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except ConfigError:
        listener.close()
        raise
    return listener


def listen(listener: socket.socket) -> None:
    """Let clients connect. Raises `ConfigError` if another process listens on the address by now."""
    if listener.family == socket.AF_UNIX:
        return  # It listens since it was created.
    with _as_config_error(*listener.getsockname()[:2]):
        listener.listen(BACKLOG)


def url_of(listener: socket.socket) -> str:
    """The URL of a server on this socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _as_config_error(host: str, port: int) -> Iterator[None]:
    """Turn errors of an address into a `ConfigError` that names the address and the wrong setting."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:  # The last two: not a valid host name.
        reason = getattr(error, "strerror", None) or error
        is_port = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}", param="port" if is_port else "host"
        ) from None
