"""`make check` finds the faults that it is meant to find."""

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_style", ROOT / "scripts" / "check_style.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


style = load()


def faults(inside: str, source: str) -> list[str]:
    path = style.PACKAGE / inside
    tree = ast.parse(source)
    return [*style.import_faults(path, tree), *style.structure_faults(path, source, tree)]


@pytest.mark.parametrize(
    ("inside", "line", "message"),
    [
        ("core/x.py", "import time", "core may not import time"),
        ("core/x.py", "import numpy", "core may not import numpy"),
        ("cost/x.py", "import random", "cost may not import random"),
        ("sampling_params.py", "import numpy", "sampling_params.py may not import numpy"),
        ("server/x.py", "import os; os.environ['A']", "may read os.environ"),
        ("server/x.py", "import sys; sys.argv", "may read sys.argv"),
        ("text/x.py", "object.__setattr__(a, 'b', 1)", "frozen objects must not be changed"),
        ("text/x.py", "def f():\n    global g\n", "no global state"),
        ("text/x.py", "def f():\n" + "    pass\n" * 61, "f has 62 lines, at most 60"),
        ("text/utils.py", "pass", "the name does not say what the module contains"),
        ("engine/x.py", "import pickle", "pickle must not be imported"),
        ("engine/x.py", "from multiprocessing import Process", "multiprocessing must not be imported"),
        ("models/x.py", "import torch\ntorch.load('a')", "torch.load uses pickle"),
        ("text/x.py", "pass\n" * 401, "lines, at most 400"),
    ],
)
def test_a_broken_rule_is_named(inside: str, line: str, message: str) -> None:
    found = faults(inside, f'"""A file."""\n{line}\n')
    assert any(message in fault for fault in found), found


def test_a_module_needs_a_docstring() -> None:
    assert any("no docstring" in fault for fault in faults("text/x.py", "pass\n"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('"""What the pool knows."""\n', "begins with a fragment"),
        ('"""A file."""\nX = 1\n"""Of a step."""\n', "begins with a fragment"),
        ('"""A file."""\n# whoever reads this\n', "'whoever' has a plainer equivalent"),
        ('"""A file."""\nX = "so many tokens"\n', "'so many' has a plainer equivalent"),
    ],
)
def test_a_private_word_is_named(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "x.py"
    path.write_text(source)
    assert any(message in fault for fault in style.language_faults(path, ast.parse(source)))


FORBIDDEN_IMPORTS = {
    "core/x.py": "from legato.metrics.journal import StepRecord",
    "text/x.py": "import torch",
    "models/x.py": "import numba\nfrom llvmlite import ir",
    "kernels/x.py": "from legato.core.plan import plan",
    "engine/x.py": "from legato.runner.runner import TorchRunner\nimport fastapi, prometheus_client",
    "server/transport/x.py": "from legato.server.routes.chat import chat_routes",
    "workload/a.py": "from legato.workload.b import B",
    "workload/b.py": "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from legato.workload.a import A",
}


def test_every_import_contract_is_broken_by_an_import_that_it_forbids(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "legato", tmp_path / "legato", ignore=shutil.ignore_patterns("__pycache__", "*.json")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for inside, lines in FORBIDDEN_IMPORTS.items():
        (tmp_path / "legato" / inside).write_text(f'"""A file."""\n{lines}\n')
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    run = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Contracts: 0 kept, 9 broken." in run.stdout, run.stdout + run.stderr
