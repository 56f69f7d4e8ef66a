"""Every case of the collection has a test that carries its id, or a reason in docs/cases.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if path != Path(__file__)]

# The ids of the reference collection "Cases from public bug reports of LLM servers", which is kept outside of
# this repository (shared/reference/cases.md). A letter is a kind of trouble, and numbers have gaps.
NUMBERS = {
    "A": "01 02 04 07 08 09 10 12 13 15 17 19 20 22",
    "B": "01 03 05 06 07 08 10 11 12 14 15 17 18 19 21 22 23 24 25 26",
    "C": "01 02 04 05 06 07 10 12 14 15 16 17 18",
    "D": "01 02 04 05 07 09 10 12 14 15 16 17 18 19",
    "E": "01 03 05 07 08 11 12 13 14 15",
    "F": "01 02 03 04 06 07 08 09 10 12 13 14 15 16 17 18 19 21 22",
    "G": "01 02 04 05 07 10 11 12 13",
    "H": "01 02 04 05 07 09 10",
    "I": "01 02 04 06 08",
    "J": "01 03 04 05 06 07 09 11 13",
    "N": "01 02 03 04 05 06 07 08 10 12",
}
CASES = {f"{kind}-{number}" for kind, numbers in NUMBERS.items() for number in numbers.split()}

ID = re.compile(r"\b[A-JN]-\d\d\b")
NAME = re.compile(r"^test_([a-jn])_(\d\d)_")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def carried(source: str) -> Iterator[str]:
    """The ids in names and docstrings of tests, and those that stand alone as a text: names of parameters."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED):
            yield from ID.findall(ast.get_docstring(node) or "")
        if isinstance(node, ast.FunctionDef) and (match := NAME.match(node.name)):
            yield f"{match[1].upper()}-{match[2]}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ID.fullmatch(node.value):
            yield node.value


def in_tests() -> set[str]:
    return {case for path in TESTS for case in carried(path.read_text())}


def in_docs() -> set[str]:
    return set(ID.findall((ROOT / "docs" / "cases.md").read_text()))


def test_where_an_id_counts() -> None:
    source = '''"""A-02 and A-03"""  # A-01
def test_b_04_it_works():
    """B-05; neither UTF-16 nor B-99x is one."""
    return ["C-06", "a C-07"]
'''
    assert sorted(carried(source)) == ["A-02", "A-03", "B-04", "B-05", "C-06"]


def test_every_case_is_tested_or_has_a_reason_why_not() -> None:
    assert sorted(CASES - in_tests() - in_docs()) == []


def test_every_id_is_that_of_a_case() -> None:
    assert sorted((in_tests() | in_docs()) - CASES) == []
