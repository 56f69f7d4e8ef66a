"""Runs the commands and examples of README.md in their order, as they are written, in an empty folder.

What differs: servers listen on a free port in place of 8000 and are started as `make serve` starts them; the
other targets of make are only looked up; without --online the trace that is downloaded is made up; models
that are not installed are left out, and said to be.

    python scripts/readme_walk.py [--online] [README.md]
"""

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).parent.parent
COMMAND_S, START_S = 900, 900
"""Seconds that a command, and the start of a server, may take."""
BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Snippet:
    """A command or an example."""

    language: str
    """sh, python or toml."""
    text: str


def snippets(markdown: str) -> Iterator[Snippet]:
    """Those of a text, in order. A fence without a language holds output; indented blocks hold commands."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    indented = re.compile(r"(?<=\n\n)(?: {4}\S.*\n(?: {4,}.*\n)*)")
    found = [(match.start(), match[1], match[2]) for match in fence.finditer(markdown)]
    inside = [(match.start(), match.end()) for match in fence.finditer(markdown)]
    for match in indented.finditer(markdown):
        if not any(start <= match.start() < end for start, end in inside):
            lines = "".join(line[4:] + "\n" for line in match[0].splitlines())
            found += [
                (match.start() + place, "sh", command)
                for place, command in enumerate(lines.replace("\\\n", " ").splitlines())
            ]
    for _, language, text in sorted(found):
        if language:
            yield Snippet(language, text.strip())


class Walk:
    """Runs snippets in one folder; use it in a `with` block, which ends its server."""

    def __init__(self, folder: Path, *, online: bool) -> None:
        self._folder, self._online = folder, online
        self._servers = ExitStack()
        self._has_server = False
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    def __enter__(self) -> "Walk":
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.close()

    def run(self, snippet: Snippet) -> str:
        """What it was like: "ok", or why it was left out. Raises `RuntimeError` if it fails."""
        if snippet.language == "toml":
            (self._folder / "walk.toml").write_text(snippet.text.replace('"keys"', '"/dev/null"'))
            return self._shell("legato config --config walk.toml")
        text = snippet.text.replace("127.0.0.1:8000", f"127.0.0.1:{self._port}")
        if snippet.language == "python":
            (self._folder / "walk.py").write_text(text)
            return self._shell("python walk.py") if self._may_run(text) else "left out: no server"
        words = shlex.split(text, comments=True)
        if words[:2] == ["make", "serve"]:
            return self._serve([word.removeprefix("MODEL=") for word in words[2:]])
        if words[0] == "make":
            return self._shell(f"make -n -C {ROOT} {shlex.join(words[1:])}")
        if words[0] == "curl" and not self._online and words[-1].startswith("https://"):
            write_trace(self._folder / words[-1].rpartition("/")[2])
            return "left out: made up in place of a download"
        return self._shell(text) if self._may_run(text) else "left out: no server"

    def _may_run(self, text: str) -> bool:
        return self._has_server or f":{self._port}" not in text

    def _serve(self, model: list[str]) -> str:
        """A server in place of the one before."""
        self._servers.close()
        self._has_server = False
        log = self._folder / "server.log"
        with log.open("w") as out:
            server = subprocess.Popen(
                ["legato", "serve", *model, "--port", str(self._port)],
                cwd=self._folder,
                env=self._environment,
                stdout=out,
                stderr=out,
            )
        self._servers.callback(server.wait, timeout=60)
        self._servers.callback(server.terminate)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and server.poll() is None:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{self._port}/ready", timeout=5):
                self._has_server = True
                return "ok"
            time.sleep(0.2)
        told = log.read_text()
        if "is not installed" in told:
            return f"left out: {told.splitlines()[-1]}"
        raise RuntimeError(f"the server does not start:\n{told}")

    def _shell(self, command: str) -> str:
        done = subprocess.run(
            command,
            shell=True,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode != 0 or not done.stdout.strip() or '{"error"' in done.stdout:
            raise RuntimeError(f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return "ok"


def write_trace(path: Path) -> None:
    """300 requests in the form of Azure's trace, one every two seconds."""
    start = datetime.fromisoformat("2023-11-16 18:15:46.680590")
    rows = [
        f"{start + timedelta(seconds=2 * i)}0,{100 + 37 * i % 1500},{10 + 13 * i % 300}" for i in range(300)
    ]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("readme", nargs="?", type=Path, default=ROOT / "README.md")
    parser.add_argument("--online", action="store_true", help="download what is to be downloaded")
    options = parser.parse_args()
    num_failed = 0
    with tempfile.TemporaryDirectory() as folder, Walk(Path(folder), online=options.online) as walk:
        for snippet in snippets(options.readme.read_text(encoding="utf-8")):
            started = time.monotonic()
            try:
                outcome = walk.run(snippet)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                outcome, num_failed = f"FAILED: {error}", num_failed + 1
            first_line = snippet.text.splitlines()[0]
            print(f"{time.monotonic() - started:6.1f} s  {first_line:.100}  {outcome}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
