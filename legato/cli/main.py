"""The console script `legato`. Everything but the version is imported when it is needed."""

import os
import sys

from legato import __version__
from legato.cli.interrupts import importing

VERSION_WORDS = ("--version", "-V", "version")


def run() -> None:
    """Run the command of `sys.argv`. Every failure is one line on standard error: status 2 for a command line
    that makes no sense, 1 for all else that is wrong, 130 after Ctrl-C."""
    words = sys.argv[1:]
    if len(words) == 1 and words[0] in VERSION_WORDS:
        print(__version__)
        return
    # Torch's threads would go on using a core for a while after each of its operations, and take it from the
    # kernels' own. Read when torch is loaded, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with importing():
        from legato.cli.commands import run_command

    raise SystemExit(run_command(words or ["--help"]))
