"""README.md's commands and examples: known flags in all of them, and, of `make test-all`, that they run."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.readme_walk import Snippet, snippets

README = list(snippets(Path("README.md").read_text(encoding="utf-8")))


def test_the_snippets_of_a_text_are_found_in_order() -> None:
    text = (
        "\n    make serve   # a note\n\n    curl x \\\n      -d y\n\ntext\n"
        "\n```python\nimport a\n\n    b()\n```\n"
        "\n```\noutput\n\n    of a command\n```\n\n    legato chat\n"
    )
    assert list(snippets("# A\n" + text)) == [
        Snippet("sh", "make serve   # a note"),
        Snippet("sh", "curl x    -d y"),
        Snippet("python", "import a\n\n    b()"),
        Snippet("sh", "legato chat"),
    ]


def test_readme_has_what_a_newcomer_needs() -> None:
    commands = " ".join(snippet.text for snippet in README if snippet.language == "sh")
    for wanted in (
        "make serve",
        "MODEL=qwen2.5-coder-1.5b-instruct",
        "curl",
        "legato simulate",
        "legato tune",
    ):
        assert wanted in commands
    assert {"python", "toml"} <= {snippet.language for snippet in README}


@pytest.mark.parametrize(
    "command",
    [snippet.text for snippet in README if snippet.text.startswith("legato ")],
    ids=lambda text: text[:60],
)
def test_every_flag_of_a_command_exists(command: str, tmp_path: Path) -> None:
    """-h comes after the flags are read."""
    out = subprocess.run(
        [sys.executable, "-c", "from legato.cli.main import run; run()", *shlex.split(command)[1:], "-h"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (out.returncode, out.stderr) == (0, ""), out


@pytest.mark.parametrize(
    "example",
    [snippet.text for snippet in README if snippet.language == "python"],
    ids=lambda text: text[:30],
)
def test_every_example_is_python(example: str) -> None:
    compile(example, "README.md", "exec")


@pytest.mark.big
@pytest.mark.timeout(1800)
def test_everything_runs_as_it_is_written() -> None:
    out = subprocess.run(
        [sys.executable, "scripts/readme_walk.py"], capture_output=True, text=True, timeout=1700, check=False
    )
    assert out.returncode == 0, out.stdout + out.stderr
