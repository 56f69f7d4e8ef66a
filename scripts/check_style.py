"""Rules that ruff, mypy and import-linter do not check: sizes, forbidden calls, plain English."""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "legato"

MAX_FILE, MAX_FUNCTION, MAX_CORE = 400, 60, 2700

STDLIB_ONLY = ("core", "cost", "sampling_params.py")
"""Parts that may import only these modules: nothing with a clock, a thread or a device."""
PURE_STDLIB = {
    *("bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools", "math"),
    *("struct", "typing"),
}

UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing"}
"""Modules that run code from what they read, and one that sends such data between processes."""

ENVIRONMENT_READERS = ("cli",)

BANNED_WORDS = (
    *("whoever", "whomever", "somebody", "who comes", "who asks", "so many", "so much"),
    *("lobby", "visitors?", "untold", "newcomers?", "strangers?", "crumbs?", "the law", "the house", "a bed"),
)
"""Words and phrases that have a plainer equivalent in the field's English."""
FRAGMENT = re.compile(r"(?:What|Whose|Whom|Who|Of|As|Those|By) ")
"""The beginning of a docstring that is a sentence fragment."""

PLAIN_PACKAGES = ("core", "cost", "sampling_params.py", "server", "engine")
"""The parts of the package whose language is checked."""


def part_of(path: Path) -> str:
    """The package or the module directly under legato/."""
    return path.relative_to(PACKAGE).parts[0]


def structure_faults(path: Path, source: str, tree: ast.Module) -> Iterator[str]:
    if (num_lines := source.count("\n")) > MAX_FILE:
        yield f"{path}: {num_lines} lines, at most {MAX_FILE}"
    if ast.get_docstring(tree) is None:
        yield f"{path}: the module has no docstring"
    if path.name == "utils.py":
        yield f"{path}: the name does not say what the module contains"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in ("os.environ", "os.getenv", "sys.argv") and part_of(path) not in ENVIRONMENT_READERS:
                yield f"{path}:{node.lineno}: only {', '.join(ENVIRONMENT_READERS)} may read {name}"
            if name in ("torch.load", "torch.save"):
                yield f"{path}:{node.lineno}: {name} uses pickle"
            if name == "object.__setattr__":
                yield f"{path}:{node.lineno}: frozen objects must not be changed"
        elif isinstance(node, ast.Global):
            yield f"{path}:{node.lineno}: no global state"


def import_faults(path: Path, tree: ast.Module) -> Iterator[str]:
    is_pure = part_of(path) in STDLIB_ONLY
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.module:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if top in UNSAFE:
                yield f"{path}:{node.lineno}: {top} must not be imported: it can run code from what it reads"
            if is_pure and top != "legato" and top not in PURE_STDLIB:
                yield f"{path}:{node.lineno}: {part_of(path)} may not import {top}"


def texts(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The comments, docstrings and string literals of a file, with their lines."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions, and of attributes and constants."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, child.value.value


def language_faults(path: Path, tree: ast.Module) -> Iterator[str]:
    banned = re.compile(rf"\b(?:{'|'.join(BANNED_WORDS)})\b", re.IGNORECASE)
    for line, text in texts(path, tree):
        if (match := banned.search(text)) is not None:
            yield f"{path}:{line}: {match[0]!r} has a plainer equivalent"
    for line, text in docstrings(tree):
        if FRAGMENT.match(text):
            yield f"{path}:{line}: the docstring begins with a fragment: {text.splitlines()[0][:60]!r}"


def main() -> int:
    faults: list[str] = []
    num_core = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        faults += structure_faults(path, source, tree)
        faults += import_faults(path, tree)
        if part_of(path) in PLAIN_PACKAGES:
            faults += language_faults(path, tree)
        if part_of(path) == "core":
            num_core += source.count("\n")
    if num_core > MAX_CORE:
        faults.append(f"core has {num_core} lines, at most {MAX_CORE}")
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
