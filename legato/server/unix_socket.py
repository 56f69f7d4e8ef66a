"""A Unix socket to listen on: made with its mode, replaced if its server is gone, removed at the end."""

import os
import socket
import stat
from pathlib import Path

from legato.errors import ConfigError

ANSWER_S = 1.0
"""How long a server that has the socket may take to accept."""


def bind_unix(path: Path, *, mode: int, backlog: int) -> socket.socket:
    """A listening socket at `path`. What a server that ended has left there is replaced.

    Raises `ConfigError` if a server listens there, if there is anything but a socket, or if none can be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            path.unlink()
        # The mode has to be right from the first moment: the socket may be all that guards the server.
        before = os.umask(0o777 & ~mode)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(backlog)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {path}: {reason}", param="uds") from None
    except ConfigError:
        listener.close()
        raise
    return listener


def remove_unix(listener: socket.socket, path: Path, inode: int) -> None:
    """Close the socket, and remove its file unless another server has put its own there."""
    listener.close()
    try:
        if path.stat().st_ino == inode:
            path.unlink()
    except OSError:
        return


def _is_left_over(path: Path) -> bool:
    """Whether there is a socket on which nobody listens. Raises `ConfigError` for everything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"cannot listen on {path}: it exists and is not a socket", param="uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(ANSWER_S)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            pass
    raise ConfigError(f"cannot listen on {path}: a server listens there", param="uds")
