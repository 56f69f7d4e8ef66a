"""A Unix socket to listen on. It is created with its mode, replaced if it is stale, and removed at the
end."""

import os
import socket
import stat
from pathlib import Path

from legato.errors import ConfigError

CONNECT_S = 1.0
"""Seconds that a server on the socket may take to accept."""


def bind_unix(path: Path, *, mode: int, backlog: int) -> socket.socket:
    """A listening socket at `path`. Replaces a stale socket of a server that has ended.

    Raises `ConfigError` if a server listens there, if the path is not a socket, or if none can be created.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_stale(path):
            path.unlink()
        # The mode must be right from the first moment: it may be the only access control.
        before = os.umask(0o777 & ~mode)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(backlog)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name.
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {path}: {reason}", param="uds") from None
    except ConfigError:
        listener.close()
        raise
    return listener


def remove_unix(listener: socket.socket, path: Path, inode: int) -> None:
    """Close the socket, and remove its file unless another server has replaced it."""
    listener.close()
    try:
        if path.stat().st_ino == inode:
            path.unlink()
    except OSError:
        return


def _is_stale(path: Path) -> bool:
    """Whether `path` is a socket without a server. Raises `ConfigError` for anything else that exists."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"cannot listen on {path}: it exists and is not a socket", param="uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(CONNECT_S)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            pass
    raise ConfigError(f"cannot listen on {path}: a server listens there", param="uds")
