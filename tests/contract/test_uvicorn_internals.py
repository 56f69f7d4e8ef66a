"""The internals of uvicorn and httptools that `legato.server.transport` overrides or reads.

A new version of uvicorn may change them. Then this test names what to look at.
"""

import inspect

import httptools
import pytest
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

PARAMETERS = {
    HttpToolsProtocol.__init__: ["config", "server_state", "app_state"],
    HttpToolsProtocol.connection_made: ["transport"],
    HttpToolsProtocol.connection_lost: ["exc"],
    HttpToolsProtocol.data_received: ["data"],
    HttpToolsProtocol.on_headers_complete: [],
    HttpToolsProtocol.on_body: ["body"],
    HttpToolsProtocol.on_message_complete: [],
    HttpToolsProtocol.pause_writing: [],
    HttpToolsProtocol.resume_writing: [],
    HttpToolsProtocol.timeout_keep_alive_handler: [],
    HttpToolsProtocol._unset_keepalive_if_required: [],
    RequestResponseCycle.send: ["message"],
    Server.serve: ["sockets"],
    Server.startup: ["sockets"],
    Server.capture_signals: [],
}


@pytest.mark.parametrize("method", PARAMETERS, ids=lambda method: method.__qualname__)
def test_a_method_of_uvicorn_has_the_expected_parameters(method: object) -> None:
    names = list(inspect.signature(method).parameters)[1:]  # type: ignore[arg-type]
    assert names[: len(PARAMETERS[method])] == PARAMETERS[method]  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            HttpToolsProtocol,
            ("loop", "parser", "scope", "headers", "url", "transport", "flow", "cycle", "timeout_keep_alive",
             "timeout_keep_alive_task"),
        ),
        (
            RequestResponseCycle,
            ("response_started", "response_complete", "more_body", "disconnected", "message_event",
             "chunked_encoding", "expected_content_length"),
        ),
        (Server, ("started", "should_exit", "servers", "lifespan", "server_state", "config")),
        (ServerState, ("connections",)),
        (Config, ("http_protocol_class",)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_an_attribute_of_uvicorn_exists(kind: type, names: tuple[str, ...]) -> None:
    source = inspect.getsource(kind)
    assert [name for name in names if f"self.{name}" not in source] == []


def test_the_parser_of_httptools_has_what_uvicorn_and_legato_use() -> None:
    names = ("feed_data", "should_upgrade", "get_method", "get_http_version", "set_dangerous_leniencies")
    assert [name for name in names if not hasattr(httptools.HttpRequestParser, name)] == []
    assert issubclass(httptools.HttpParserUpgrade, Exception)
    assert not issubclass(httptools.HttpParserUpgrade, httptools.HttpParserError)


def test_the_installed_version_is_one_that_was_tested() -> None:
    major, minor = map(int, uvicorn.__version__.split(".")[:2])
    assert (0, 34) <= (major, minor) < (0, 55)
