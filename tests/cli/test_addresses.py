"""Where `legato serve` listens, and what it says of it. No model is loaded: only the address matters."""

import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from test_commands import COMMAND, legato


@contextmanager
def serving(*arguments: str, cwd: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is up, and the line that says so; its errors are in the file `err`."""
    with (cwd / "err").open("w") as err:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--simulate", "gemma3-270m", *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    with process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


def test_a_unix_socket_from_start_to_end(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with serving("--uds", "s.sock", "--uds-mode", "660", cwd=tmp_path) as (process, line):
        assert line == f"Legato is ready on unix:{path} (simulated: there is no model)\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            assert client.get("/v1/models").status_code == 200
        second = legato("serve", "--simulate", "gemma3-270m", "--uds", str(path), cwd=tmp_path)
        assert second.returncode == 1
        assert second.stderr.endswith(f"cannot listen on {path}: a server listens there (--uds)\n")
        process.kill()
        process.wait(20)
        assert path.exists()
    with serving("--uds", str(path), cwd=tmp_path) as (_, line):
        assert "ready" in line
    assert not path.exists()
    assert "can be reached" not in (tmp_path / "err").read_text()


@pytest.mark.parametrize(
    ("arguments", "environment", "warned"),
    [
        (["--host", "0.0.0.0"], {}, True),
        (["--host", "::"], {}, True),
        (["--host", "0.0.0.0"], {"LEGATO_API_KEY": "secret"}, False),
        (["--host", "127.0.0.1"], {}, False),
        (["--host", "localhost"], {}, False),
        (["--host", "::1"], {}, False),
    ],
    ids=["all", "all IPv6", "with a key", "this machine", "by name", "by IPv6"],
)
def test_a_server_for_everyone_without_a_key_is_warned_of(
    arguments: list[str], environment: dict[str, str], warned: bool, tmp_path: Path
) -> None:
    with serving("--port", "0", *arguments, cwd=tmp_path, **environment) as (_, line):
        assert "ready on http://" in line
    words = "can be reached from other machines, and no API key guards it"
    assert (words in (tmp_path / "err").read_text()) == warned


def test_the_warning_is_a_line_of_json_where_the_log_is(tmp_path: Path) -> None:
    arguments = ["--port", "0", "--host", "0.0.0.0", "--log-format", "json"]
    with serving(*arguments, cwd=tmp_path):
        pass
    lines = (tmp_path / "err").read_text().splitlines()
    assert all(line.startswith('{"time"') for line in lines)
    assert any("no API key guards it" in line and '"level": "warning"' in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", ""], "--host: host must name an address"),
        (["--host", " "], "--host: host must name an address"),
        (["--host", "no.such.host.invalid"], "(--host)"),
        (["--host", "192.0.2.7"], "(--host)"),
        (["--uds", "s", "--port", "8000"], "--port, --uds: uds stands for host and port; give one of them"),
        (["--uds", "no/folder/s"], "cannot listen on"),
        (["--uds", "s", "--uds-mode", "888"], "--uds-mode"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_address_that_cannot_be_is_refused_by_its_own_name(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    out = legato("serve", "--simulate", "gemma3-270m", *arguments, cwd=tmp_path)
    assert (out.returncode, out.stdout) == (1, "")
    assert message in out.stderr
    assert "Traceback" not in out.stderr
    assert len(out.stderr.splitlines()) == 1
