"""A real server for each test that asks for one."""

from collections.abc import Callable, Iterator

import pytest
from server_rig import RunningServer, build_service

StartServer = Callable[..., RunningServer]


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Starts servers on free ports, `start_server(runner, **changes of the Service)`; stops them at the end."""
    servers: list[RunningServer] = []

    def start(runner: object = None, *, shutdown_timeout: float = 5.0, **changes: object) -> RunningServer:
        server = RunningServer(build_service(runner, **changes), shutdown_timeout=shutdown_timeout)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()
