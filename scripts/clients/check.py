"""Do other people's clients work unchanged? Each runs a chat, a stream, a tool call and a JSON schema call.

    make clients                        all clients, on the packaged demo model
    python scripts/clients/check.py FOLDER --checks chat stream -- --policy fcfs

Installs the clients under FOLDER (a virtual environment and node_modules of their own), starts a server on a
free port with the arguments behind `--`, and runs one program for each client against it. Needs npm and node
for the npm package. Ends with status 1 if a check failed.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
CHECKS = ("chat", "stream", "tool", "schema")
PYTHON_CLIENTS = {"openai": ["openai"], "litellm": ["litellm"], "langchain": ["langchain-openai"]}
"""Program `with_NAME.py` -> what it needs from PyPI."""
OFFLINE = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""LiteLLM fetches a list of prices otherwise."""
READY = "Legato is ready on "


def main() -> int:
    own, _, for_server = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description="Check that other clients work.")
    parser.add_argument("folder", type=Path, help="where the clients are installed")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS)
    options = parser.parse_args(own.split())
    python, node = _install(options.folder.resolve())
    commands = {name: [str(python), str(HERE / f"with_{name}.py")] for name in PYTHON_CLIENTS}
    commands["npm openai"] = ["node", str(node)]
    failed = []
    with _server(for_server.split()) as url:
        for name, command in commands.items():
            print(f"-- {name}", flush=True)
            if subprocess.run([*command, f"{url}/v1", *options.checks], env=OFFLINE).returncode:
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all clients passed")
    return int(bool(failed))


def _install(folder: Path) -> tuple[Path, Path]:
    """The Python that has the clients, and the node program beside its packages."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    packages = sorted({package for needed in PYTHON_CLIENTS.values() for package in needed})
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    node = folder / "node"
    node.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--silent", "--no-fund", "--prefix", node, "openai"], check=True)
    program = node / "with_npm.mjs"  # node looks for packages beside the program
    program.write_text((HERE / "with_npm.mjs").read_text())
    return python, program


@contextmanager
def _server(arguments: list[str]) -> Iterator[str]:
    """A `legato serve` in a process of its own, and its address."""
    command = [sys.executable, "-c", "from legato.cli.main import run; run()", "serve", "--port", "0"]
    template = ["--chat-template", str(HERE / "chatml_tools.jinja")]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    with subprocess.Popen(
        [*command, *template, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(READY):
                raise SystemExit("the server did not start")
            yield line.removeprefix(READY).strip()
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
