"""Plants known faults, one at a time, in a copy of the tree, and checks that a named test finds each.

    python scripts/mutants.py              all faults
    python scripts/mutants.py core         the faults that the tests of one package must find
    python scripts/mutants.py --check      only check that each fault can be planted; runs no test

The faults are in tests/*/mutants.py. If one survives, a test has become blind. If its text is not in the
source exactly once, it must be adapted to the new code.
"""

import argparse
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    """Replace `old` by `new` in `file`. Then `test` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


def mutants(package: str = "*") -> list[Mutant]:
    files = sorted((ROOT / "tests").glob(f"{package}/mutants.py"))
    return [Mutant(*entry) for file in files for entry in runpy.run_path(str(file))["MUTANTS"]]


def problem(mutant: Mutant) -> str | None:
    """Why a fault cannot be planted. None if it can."""
    path = ROOT / mutant.file
    count = path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0
    if count != 1:
        return f"{mutant.file} contains {mutant.old!r} {count} times, not once"
    test = ROOT / mutant.test.partition("::")[0]
    name = mutant.test.rpartition("::")[2].partition("[")[0]
    source = test.read_text(encoding="utf-8") if test.exists() else ""
    if f"def {name}(" not in source and f"class {name}" not in source:
        return f"there is no test {mutant.test}"
    return None


@contextmanager
def planted(mutant: Mutant) -> Iterator[Path]:
    """A copy of the tree that contains the fault."""
    with tempfile.TemporaryDirectory(prefix="legato-mutant-") as folder:
        copy = Path(folder)
        for name in ("legato", "tests", "scripts"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        file = copy / mutant.file
        file.write_text(file.read_text().replace(mutant.old, mutant.new))
        yield copy


def verdict(mutant: Mutant) -> str:
    """killed, survived, or why there is no result."""
    if (reason := problem(mutant)) is not None:
        return f"not planted: {reason}"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.test]
    with planted(mutant) as tree:
        run = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if run.returncode == 1:
        return "killed"
    return "survived" if run.returncode == 0 else f"no result: {run.stdout.strip()[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("package", nargs="?", default="*", help="a folder of tests/")
    parser.add_argument("--check", action="store_true", help="only check that the faults can be planted")
    given = parser.parse_args()
    chosen = mutants(given.package)
    if given.check:
        problems = [f"{mutant.name}: {reason}" for mutant in chosen if (reason := problem(mutant))]
        print("\n".join(problems) or f"{len(chosen)} faults can be planted")
        return 1 if problems else 0
    num_left = 0
    for mutant in chosen:
        began = time.monotonic()
        result = verdict(mutant)
        if result != "killed":
            num_left += 1
        print(f"{result:10} {time.monotonic() - began:5.1f} s  {mutant.name}  ({mutant.test})", flush=True)
    print(f"{len(chosen) - num_left} of {len(chosen)} faults found")
    return 1 if num_left or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
