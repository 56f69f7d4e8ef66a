"""The rules of the house that no linter knows: who imports whom, and how long things may get.

docs/architecture.md, section 3, in code. Reads the source; imports nothing of it.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "legato"

RANKS: tuple[frozenset[str], ...] = tuple(
    frozenset(rooms.split())
    for rooms in (
        "errors",
        "machine",
        "config",
        "sampling_params",
        "cost",
        "core",
        "metrics",
        "text workload",
        "kernels",
        "attention",
        "models",
        "runner",
        "engine",
        "disagg sim",
        "server bench cluster",
        "tune",
        "cli",
    )
)
"""Lowest first. A room may import rooms of lower rank and itself; never up, never sideways."""

ONLY_IN = {
    "torch": "attention models runner disagg",
    "numba": "kernels",
    "llvmlite": "kernels",
    "fastapi": "server",
    "starlette": "server",
    "uvicorn": "server",
    "httptools": "server",
    "prometheus_client": "metrics",
    "ray": "cluster",
}
"""Library -> the only rooms that may import it."""

NOWHERE = "pickle cPickle dill cloudpickle joblib shelve marshal multiprocessing"
"""Libraries that run code from what they read, and one that sends such things between processes."""

NEEDS_ONLY = {"kernels": "config errors"}
"""Rooms that may import less of legato than their rank allows."""

CORE_STDLIB = "bisect collections dataclasses enum functools hashlib heapq itertools math struct typing"
"""All that `core` may import besides itself and `legato.errors`: nothing with a clock, thread or device."""

ENVIRONMENT_READERS = {"cli"}
RUNNER_IMPORTERS = {"runner", "engine/build.py"}
MAX_FILE, MAX_FUNCTION, MAX_CORE = 400, 60, 2700


def rank(room: str) -> int:
    return next(i for i, rooms in enumerate(RANKS) if room in rooms)


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "legato":
                yield from ((node.lineno, f"legato.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def import_faults(path: Path, tree: ast.AST) -> Iterator[str]:
    room, inside = room_of(path), path.relative_to(PACKAGE).as_posix()
    for line, module in imports(tree):
        top, *rest = module.split(".")
        where = f"{path}:{line}"
        if top == "legato":
            target = rest[0] if rest else "__version__"
            if target == "__version__" or room == "__init__":
                continue
            if target != room and rank(target) >= rank(room):
                yield f"{where}: {room} may not import {target}"
            if target != room and target not in NEEDS_ONLY.get(room, target).split():
                yield f"{where}: {room} may import only {NEEDS_ONLY[room]}"
            if target == "runner" and not {room, inside} & RUNNER_IMPORTERS:
                yield f"{where}: only {sorted(RUNNER_IMPORTERS)} may import runner"
        elif top in NOWHERE.split():
            yield f"{where}: {top} may be imported nowhere: what it reads can run code"
        elif top in ONLY_IN and room not in ONLY_IN[top].split():
            yield f"{where}: {top} may be imported only in {ONLY_IN[top]}"
        elif room == "core" and top not in CORE_STDLIB.split():
            yield f"{where}: core may not import {top}"


def other_faults(path: Path, source: str, tree: ast.AST) -> Iterator[str]:
    if (lines := source.count("\n")) > MAX_FILE:
        yield f"{path}: {lines} lines, at most {MAX_FILE}"
    if ast.get_docstring(tree) is None:  # type: ignore[arg-type]
        yield f"{path}: no docstring that says what it does"
    if path.name == "utils.py":
        yield f"{path}: a name that says nothing"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in ("os.environ", "os.getenv", "sys.argv") and room_of(path) not in ENVIRONMENT_READERS:
                yield f"{path}:{node.lineno}: only {sorted(ENVIRONMENT_READERS)} may read {name}"
            if name in ("torch.load", "torch.save"):
                yield f"{path}:{node.lineno}: {name} means pickles"
            if name == "object.__setattr__":
                yield f"{path}:{node.lineno}: frozen means frozen"
        elif isinstance(node, ast.Global):
            yield f"{path}:{node.lineno}: no global state"


def main() -> int:
    faults: list[str] = []
    core = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        faults += import_faults(path, tree)
        faults += other_faults(path, source, tree)
        core += source.count("\n") if room_of(path) == "core" else 0
    if core > MAX_CORE:
        faults.append(f"core has {core} lines, at most {MAX_CORE}")
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
