"""The checker of the house finds what it is there to find."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_house.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_house", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house = load()


def faults(inside: str, source: str) -> list[str]:
    path = house.PACKAGE / inside
    tree = ast.parse(source)
    return [*house.import_faults(path, tree), *house.other_faults(path, source, tree)]


@pytest.mark.parametrize(
    ("inside", "line", "message"),
    [
        ("core/x.py", "import time", "core may not import time"),
        ("core/x.py", "import numpy", "core may not import numpy"),
        ("core/x.py", "from legato.metrics.journal import StepRecord", "core may not import metrics"),
        ("core/x.py", "from legato import metrics", "core may not import metrics"),
        ("text/x.py", "import torch", "torch may be imported only in"),
        ("kernels/x.py", "import torch", "torch may be imported only in"),
        ("kernels/x.py", "from legato.attention.base import LayerCache", "kernels may not import attention"),
        ("kernels/x.py", "from legato.core.plan import StepPlan", "kernels may import only config errors"),
        ("models/x.py", "import numba", "numba may be imported only in kernels"),
        ("models/x.py", "from llvmlite import ir", "llvmlite may be imported only in kernels"),
        ("engine/llm.py", "from legato.runner.runner import TorchRunner", "may import runner"),
        ("runner/x.py", "from legato.engine.loop import EngineLoop", "runner may not import engine"),
        ("server/x.py", "import os; os.environ['A']", "may read os.environ"),
        ("server/x.py", "import sys; sys.argv", "may read sys.argv"),
        ("text/x.py", "object.__setattr__(a, 'b', 1)", "frozen means frozen"),
        ("text/x.py", "def f():\n    global g\n", "no global state"),
        ("text/x.py", "def f():\n" + "    pass\n" * 61, "f has 62 lines, at most 60"),
        ("text/utils.py", "pass", "a name that says nothing"),
        ("engine/x.py", "import pickle", "pickle may be imported nowhere"),
        ("engine/x.py", "from multiprocessing import Process", "multiprocessing may be imported nowhere"),
        ("models/x.py", "import torch\ntorch.load('a')", "torch.load means pickles"),
        ("text/x.py", "pass\n" * 401, "lines, at most 400"),
    ],
)
def test_a_broken_rule_is_named(inside: str, line: str, message: str) -> None:
    found = faults(inside, f'"""A file."""\n{line}\n')
    assert any(message in fault for fault in found), found


def test_a_file_without_docstring_is_named() -> None:
    assert any("no docstring" in fault for fault in faults("core/x.py", "import math\n"))


@pytest.mark.parametrize(
    ("inside", "line"),
    [
        ("core/x.py", "from legato.errors import ConfigError\nimport math"),
        ("engine/build.py", "from legato.runner.runner import TorchRunner"),
        ("cli/x.py", "import os; os.environ['A']"),
        ("models/x.py", "import torch\nfrom legato.attention.base import LayerCache"),
        ("models/x.py", "from legato.kernels.turn import Heads"),
        ("kernels/x.py", "import numba\nfrom legato.errors import ConfigError\nimport legato.kernels.turn"),
    ],
)
def test_what_is_allowed_is_not_named(inside: str, line: str) -> None:
    assert faults(inside, f'"""A file."""\n{line}\n') == []


def test_j_09_no_source_reads_or_writes_a_pickle() -> None:
    for path in house.PACKAGE.rglob("*.py"):
        source = path.read_text()
        tree = ast.parse(source)
        found = [*house.import_faults(path, tree), *house.other_faults(path, source, tree)]
        assert not [fault for fault in found if "pickle" in fault or "nowhere" in fault]
