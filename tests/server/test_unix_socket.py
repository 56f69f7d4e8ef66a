"""A server on a Unix socket: who may open it, what it replaces, and what it never touches."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from server_rig import RunningServer, build_service

from legato.errors import ConfigError
from legato.server.transport.loading import loading_server
from legato.server.transport.sockets import url_of
from legato.server.transport.unix_socket import bind_unix, remove_unix


def client_of(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://legato")


@pytest.fixture
def unix_server() -> Iterator[Callable[[socket.socket], RunningServer]]:
    """Start a server on a listener; it is stopped afterwards."""
    servers: list[RunningServer] = []

    def start(listener: socket.socket) -> RunningServer:
        servers.append(RunningServer(build_service(), listener=listener))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_requests_are_answered_while_it_loads_and_after(
    tmp_path: Path, unix_server: Callable[[socket.socket], RunningServer]
) -> None:
    path = tmp_path / "legato.sock"
    listener = bind_unix(path, mode=0o600, backlog=16)
    with loading_server(listener), client_of(path) as client:
        assert client.get("/health").status_code in (200, 503)
        assert client.get("/ready").status_code == 503
    server = unix_server(listener)
    assert server.lines == [f"Legato is ready on unix:{path}"]
    with client_of(path) as client:
        assert client.get("/ready").status_code == 200
        answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_its_mode_is_right_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "s"
    before = os.umask(0o077)
    try:
        with bind_unix(path, mode=mode, backlog=1):
            assert stat.S_IMODE(path.stat().st_mode) == mode
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)


def test_a_socket_that_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bind_unix(path, mode=0o600, backlog=1).close()
    assert path.exists()
    with bind_unix(path, mode=0o600, backlog=1), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_with_a_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bind_unix(path, mode=0o600, backlog=1) as first:
        with pytest.raises(ConfigError, match=f"cannot listen on {path}: a server listens there") as caught:
            bind_unix(path, mode=0o600, backlog=1)
        assert caught.value.param == "uds"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            first.accept()[0].close()


def test_anything_else_is_never_removed(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(file)
    for path in (file, link, tmp_path):
        with pytest.raises(ConfigError, match="it exists and is not a socket"):
            bind_unix(path, mode=0o600, backlog=1)
    assert (file.read_text(), link.is_symlink()) == ("mine", True)


@pytest.mark.parametrize("name", ["x" * 200, "no/such/folder/s", "a\0b"], ids=["long", "no folder", "zero"])
def test_a_path_that_cannot_be_used_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on ") as caught:
        bind_unix(tmp_path / name, mode=0o600, backlog=1)
    assert caught.value.param == "uds"
    assert "\n" not in caught.value.message


def test_at_the_end_its_file_goes_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = bind_unix(path, mode=0o600, backlog=1)
    assert url_of(listener) == f"unix:{path}"
    inode = path.stat().st_ino
    path.rename(tmp_path / "kept")
    path.write_text("another server's")
    remove_unix(listener, path, inode)
    assert path.read_text() == "another server's"
    (tmp_path / "kept").rename(path)
    remove_unix(listener, path, inode)
    assert not path.exists()
    remove_unix(listener, path, inode)
