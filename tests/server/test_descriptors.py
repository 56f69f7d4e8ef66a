"""File descriptors that run out: who is served stays served, and nothing fills the log."""

import asyncio
import errno
import logging
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from server_rig import ScriptedRunner, StartServer, slow, wait_until

from legato.server.transport import acceptor
from legato.server.transport.acceptor import RESERVE, Acceptor

STREAM = {"prompt": "hi", "max_tokens": 40, "stream": True}


@contextmanager
def limited_process(soft: int, hard: int, step_seconds: float = 0.02) -> Iterator[tuple[int, str, Path]]:
    """The fake model served with so many descriptors: process id, address, and where its log goes."""
    script = Path(__file__).with_name("serve_fake.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LIMITED, str(soft), str(hard), str(script), str(step_seconds), "5"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            url = process.stdout.readline().strip().rpartition(" ")[2]
            yield process.pid, url, process.stderr  # type: ignore[misc]
        finally:
            process.kill()


LIMITED = """
import os, resource, sys
soft, hard, *command = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
os.execv(sys.executable, [sys.executable, *command])
"""


def num_open(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    with limited_process(256, 700) as (pid, _, _):
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (700, 700)


@linux
@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"], ids=["idle", "half"])
def test_more_connections_than_descriptors_leave_the_running_stream_alone(sent: bytes) -> None:
    """With idle ones even a new client is served: they make room for it. Those that are half a request wait
    for their time to be over; new clients wait with them."""
    with limited_process(256, 256) as (pid, url, log), ExitStack() as open_connections:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            began = time.monotonic()
            for _ in range(400):
                connection = open_connections.enter_context(socket.create_connection(address))
                connection.sendall(sent)
            most = num_open(pid)
            text = "\n".join(lines)
        assert text.count('"text"') == 39
        assert text.rstrip().endswith("[DONE]")
        if not sent:
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        most = max(most, num_open(pid))
        elapsed = time.monotonic() - began
        assert most <= 256 - RESERVE + 8, "the reserve is kept"
        open_connections.close()
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        os.kill(pid, 15)
        lines_logged = log.read().splitlines()  # type: ignore[attr-defined]
    assert 1 <= len(lines_logged) <= 2 * elapsed + 5, lines_logged
    assert all("connections are open, the most possible" in line for line in lines_logged)


class FullTable:
    """A listening socket of a process without a free descriptor."""

    def __init__(self) -> None:
        self.asked = 0
        self._ours, self._theirs = socket.socketpair()
        self._theirs.sendall(b"x")  # it stays ready

    def fileno(self) -> int:
        return self._ours.fileno()

    def setblocking(self, flag: bool) -> None:
        self._ours.setblocking(flag)

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()

    def accept(self) -> None:
        self.asked += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_an_accept_that_fails_is_not_tried_in_circles_and_logged_once_a_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.02)
    listener = FullTable()
    closed = []

    async def run() -> None:
        acceptor = Acceptor(
            listener,  # type: ignore[arg-type]
            asyncio.Protocol,
            num_connections=lambda: 0,
            make_room=lambda: closed.append(1) or 1,  # type: ignore[func-returns-value]
            max_connections=100,
        )
        await asyncio.sleep(0.3)
        acceptor.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    listener.close()
    assert 2 <= listener.asked <= 16
    assert len(closed) == listener.asked
    assert [record.message for record in caplog.records] == [
        "no connection can be accepted: Too many open files; new connections wait"
    ]


def test_only_idle_connections_make_room_and_the_oldest_first(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legato.server.transport.server.max_connections", lambda limit: 3)  # noqa: ARG005
    monkeypatch.setattr("legato.server.transport.connection.MAX_CLOSED_IDLE", 1)
    server = start_server(ScriptedRunner(before=slow(0.02)))
    address = ("127.0.0.1", server.port)
    with (
        httpx.stream("POST", f"{server.url}/v1/completions", json=STREAM) as stream,
        socket.create_connection(address) as old,
        socket.create_connection(address) as young,
    ):
        lines = stream.iter_lines()
        next(lines)
        wait_until(lambda: httpx.get(f"{server.url}/health", timeout=5).status_code == 200)
        old.settimeout(5)
        assert old.recv(1) == b"", "it was closed"
        young.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        young.settimeout(5)
        assert young.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert "\n".join(lines).rstrip().endswith("[DONE]")
