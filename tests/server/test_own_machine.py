"""A server without a key on a loopback address answers its own machine, and no web page of another."""

import socket

import pytest
from server_rig import ask, build_service

from legato.cli.serve import _needs_guard, _service, _stand_in
from legato.config import load_settings
from legato.server.transport.api_keys import ApiKeys
from legato.server.transport.loopback_guard import is_loopback
from legato.server.transport.sockets import bind

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 1}


def status(headers: dict[str, str], method: str = "POST", **changes: object) -> int:
    service = build_service(**{"loopback_only": True, **changes})
    path = COMPLETIONS if method == "POST" else "/v1/models"
    answer = ask(path, BODY, method=method, headers=headers, service=service)
    if answer.status_code == 403:
        assert answer.json()["error"]["code"] == "forbidden"
        assert "--allowed-" in answer.json()["error"]["message"]
        assert answer.headers["x-request-id"]
    return answer.status_code


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5:8000"),
        *("a.localhost:1", "box", "box:8000", "box.local", "host.docker.internal:8000", ""),
    ],
)
def test_a_name_that_cannot_be_rebound_is_answered(host: str, method: str) -> None:
    assert status({"Host": host}, method) == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8000",
            "EVIL.example.",
            "127.0.0.1.evil.example",
            "localhost.evil.com",
        ),
        *("127.0.0.1.nip.io:8000", "[evil.example]:8000", "evil.example:", "0x7f.1", "a@evil.example"),
    ],
)
def test_a_public_name_is_refused(host: str, method: str) -> None:
    assert status({"Host": host}, method) == 403
    assert status({"Host": host}, method, allowed_hosts=("other.example", "*")) == 200


def test_names_that_the_operator_adds_are_answered() -> None:
    assert status({"Host": "llm.example.org:443"}, allowed_hosts=("LLM.example.org",)) == 200
    assert status({"Host": "evil.example.org"}, allowed_hosts=("llm.example.org",)) == 403


@pytest.mark.parametrize(
    "origin",
    [
        *("http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173", "http://app.localhost"),
        *("vscode-webview://abc", "tauri://localhost", "app://obsidian.md", "chrome-extension://abc"),
    ],
)
def test_pages_and_programs_of_the_own_machine_are_answered(origin: str) -> None:
    assert status({"Host": "localhost:8000", "Origin": origin}) == 200


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "https://evil.example",
            "http://evil.example:8000",
            "null",
            "http://192.168.1.5",
            "http://box.local",
        ),
        *("http://localhost.evil.example", "http://evil.example#localhost", "evil", "http://[::1", ""),
    ],
)
def test_a_blind_post_of_another_page_is_refused(origin: str) -> None:
    """With a content type that browsers send without asking first."""
    headers = {"Host": "localhost:8000", "Origin": origin, "Content-Type": "text/plain"}
    assert status(headers) == 403
    assert status({**headers, "Host": "localhost:8000"}, allowed_origins=("*",)) == 200


def test_pages_that_the_operator_allows_are_answered_also_before_they_ask() -> None:
    allowed = ("https://ui.example",)
    assert status({"Host": "localhost", "Origin": "https://ui.example"}, allowed_origins=allowed) == 200
    headers = {"Host": "localhost", "Origin": "https://ui.example", "Access-Control-Request-Method": "POST"}
    service = build_service(loopback_only=True, allowed_origins=allowed)
    assert ask(COMPLETIONS, method="OPTIONS", headers=headers, service=service).status_code == 200
    assert status({"Host": "localhost", "Origin": "https://ui.example.evil"}, allowed_origins=allowed) == 403


def test_a_page_behind_the_same_name_is_no_other_page() -> None:
    headers = {"Host": "llm.example.org", "Origin": "https://llm.example.org"}
    assert status(headers, allowed_hosts=("llm.example.org",)) == 200
    assert status({**headers, "Origin": "https://llm.example.org:444"}, allowed_hosts=("*",)) == 403


def test_a_server_for_others_looks_at_neither() -> None:
    headers = {"Host": "llm.example.org", "Origin": "https://evil.example"}
    assert status(headers, loopback_only=False) == 200


@pytest.mark.parametrize(
    ("host", "keys", "guarded"),
    [
        ("127.0.0.1", [], True),
        ("localhost", [], True),
        ("::1", [], True),
        ("0.0.0.0", [], False),
        ("127.0.0.1", ["sk-one"], False),
    ],
)
def test_the_command_line_guards_a_server_without_a_key_on_a_loopback_address(
    host: str, keys: list[str], guarded: bool
) -> None:
    with bind(host, 0) as listener:
        assert _needs_guard(listener, ApiKeys(keys)) is guarded


def test_the_command_line_does_not_guard_a_unix_socket_nor_forget_names() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        assert not _needs_guard(listener, ApiKeys([]))
    settings = load_settings(None, {"allowed_hosts": ["a.example"]})
    served = _stand_in(settings, "gemma3-270m", noise=False)
    service = _service(served, settings, ApiKeys([]), loopback_only=True)
    assert (service.access.loopback_only, service.access.allowed_hosts) == (True, ("a.example",))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "a.localhost"])
def test_what_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "", "localhost.com"])
def test_what_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)
