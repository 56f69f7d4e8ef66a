"""A stand-in for the Hugging Face hub on localhost: enough of its HTTP API for the real client to download.

It serves the files it is given, answers 404 for repositories it lacks and 403 for gated ones, and notes every
request with the token that came along.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(kw_only=True)
class HubStandIn:
    """What a running stand-in serves, and what it was asked."""

    repositories: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Authorization header)"""
    url: str = ""

    def downloads(self) -> list[str]:
        return [path for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def running_hub(
    repositories: Mapping[str, Mapping[str, bytes]], *, gated: frozenset[str] = frozenset()
) -> Iterator[HubStandIn]:
    hub = HubStandIn(repositories=repositories, gated=gated)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(hub: HubStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append((self.command, path, self.headers.get("Authorization")))
            parts = path.removeprefix("/api/models").strip("/").split("/")
            repository = "/".join(parts[:2])
            if repository not in hub.repositories:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif repository in hub.gated:
                self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            elif path.startswith("/api/"):
                self._send(200, json.dumps(self._listing(repository, parts[2:])).encode(), {})
            else:
                self._send_file(repository, "/".join(parts[4:]))

        def _listing(self, repository: str, rest: list[str]) -> object:
            files = hub.repositories[repository]
            if rest[:1] == ["tree"]:
                return [
                    {"type": "file", "path": name, "size": len(data), "oid": _git_id(data)}
                    for name, data in files.items()
                ]
            siblings = [{"rfilename": name} for name in files]
            return {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}

        def _send_file(self, repository: str, name: str) -> None:
            data = hub.repositories[repository].get(name)
            if data is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            else:
                self._send(200, data, {"ETag": f'"{_git_id(data)}"', "X-Repo-Commit": COMMIT})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for header, value in headers.items():
                self.send_header(header, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
