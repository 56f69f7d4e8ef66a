"""What is logged: no line that a client wrote, no prompt, no key; as text and as JSON."""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import httpx
import pytest

from legato.cli.logs import JsonFormatter, LineFormatter
from legato.cli.serve import serve_model
from legato.config import load_settings
from legato.errors import ConfigError

FORGED = "x\r\n2026-01-01 00:00:00,000 INFO legato: forged\x1b[31m\u2028\u009b2J {0} %s %(message)s"


def logged(formatter: logging.Formatter, message: str, *values: object, error: bool = False) -> str:
    """What a handler with `formatter` writes for one record."""
    written = StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter)
    logger = logging.Logger("legato.test")
    logger.addHandler(handler)
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.error(message, *values, exc_info=error, extra={"fields": {"path": FORGED}})
    return written.getvalue()


def test_j_13_a_line_of_text_holds_one_record_and_nothing_unprintable() -> None:
    text = logged(LineFormatter(), "path %s", FORGED)
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()
    assert "\\r\\n2026-01-01 00:00:00,000 INFO legato: forged\\x1b[31m\\u2028\\x9b2J {0} %s" in text


def test_j_13_the_lines_of_a_traceback_cannot_be_taken_for_records() -> None:
    first, *rest = logged(LineFormatter(), "failed", error=True).splitlines()
    assert first.endswith("ERROR legato.test: failed")
    assert len(rest) > 3
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_j_13_a_record_as_json_is_one_object_on_one_line() -> None:
    (line,) = logged(JsonFormatter(), "path %s", FORGED, error=True).splitlines()
    assert line.isascii()
    record = json.loads(line)
    assert record["message"] == f"path {FORGED}"
    assert record["path"] == FORGED
    assert record["exception"].startswith("Traceback")
    assert {"time", "level", "logger"} < set(record)


@contextmanager
def served(gemma_path: Path, tmp_path: Path, *flags: str) -> Iterator[tuple[str, Path]]:
    """A `legato serve` process; its URL, and the file that gets its standard error."""
    errors = tmp_path / "stderr"
    command = [sys.executable, "-c", "from legato.cli.main import run; run()", "serve", str(gemma_path)]
    command += ["--port", "0", "--num-blocks", "64", "--threads", "1", *flags]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "LEGATO_API_KEY": "sk-one sk-two"}
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip().rpartition(" ")[2], errors
        finally:
            process.terminate()
            process.wait(20)


def test_j_13_a_servers_log_as_json_with_hostile_clients(gemma_path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-three\n\nsk-four\n")
    flags = ["--log-format", "json", "--access-log", "--log-level", "debug", "--api-key-file", str(keys)]
    secret = "a very secret prompt"
    with served(gemma_path, tmp_path, *flags) as (url, errors), httpx.Client(base_url=url) as client:
        body = {"prompt": secret, "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 401
        for key in ("sk-one", "sk-two", "sk-three", "sk-four"):
            headers = {"Authorization": f"Bearer {key}", "X-Request-ID": f"id of {key[3:]}"}
            answer = client.post("/v1/completions", json=body, headers=headers)
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, f"id of {key[3:]}")
        headers = {"Authorization": "Bearer sk-one"}
        client.get("/%0d%0a%1b[31m2026 INFO forged%e2%80%a8" + "x" * 5000 + "?key=sk-one", headers=headers)
        client.post("/v1/completions", json={**body, "model": FORGED, "user": FORGED}, headers=headers)
        for garbage in (b"\x16\x03\x01 forged\r\n\r\n", b"GET / HTTP/1.1\r\nUser-Agent: \x1b[31m\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
                connection.sendall(garbage)
                assert connection.recv(100).startswith(b"HTTP/1.1 400")
    text = errors.read_text()
    records = [json.loads(line) for line in text.splitlines()]
    requests = [record for record in records if record["logger"] == "legato.access"]
    assert [record["status"] for record in requests] == [401, 200, 200, 200, 200, 404, 404]
    assert requests[1]["request_id"] == "id of one"
    assert requests[5]["path"].startswith("/\r\n\x1b[31m2026 INFO forged\u2028xxx")
    assert len(requests[5]["path"]) == 200
    assert any(record["logger"] == "asyncio" for record in records), "lines of libraries, too"
    assert any("attention" in record["message"] for record in records), "the choices of the start"
    assert secret not in text
    assert "sk-" not in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"api_key": ["two words"]}, "printable ASCII"),
        ({"api_key": [""]}, "printable ASCII"),
        ({"api_key_file": "no/such/file"}, "no/such/file: cannot be read"),
        ({"api_key_file": "/dev/null"}, "/dev/null: no key in it"),
    ],
)
def test_keys_that_open_nothing_end_the_start(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        serve_model(load_settings(None, overrides))
    assert "\n" not in caught.value.message
    assert "two words" not in caught.value.message
