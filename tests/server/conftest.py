"""A real server for each test that asks for one."""

from collections.abc import Iterator
from contextlib import ExitStack

import openai
import pytest
from server_rig import Connect, RunningServer, StartServer, build_service


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Starts servers on free ports, `start_server(runner, **changes of the Service)`; ends them after.

    `timeouts` are arguments of `serve`."""
    servers: list[RunningServer] = []

    def start(
        runner: object = None, *, timeouts: dict[str, float] | None = None, **changes: object
    ) -> RunningServer:
        server = RunningServer(build_service(runner, **changes), **(timeouts or {}))
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes official clients, with their own defaults, of servers; closes them at the end."""
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"))
