"""Print the pip options that get a CPU build of torch, or nothing.

On Linux the default torch carries CUDA. Without an NVIDIA device the project's own CPU index is better, if it
can be reached; where it cannot (a mirror, no network), whatever index pip is set to has to do.
"""

import platform
import shutil
import urllib.error
import urllib.request

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PATIENCE_S = 3.0


def cpu_index_answers() -> bool:
    """Whether the index can be reached from here, soon."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=PATIENCE_S):
            return True
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    wanted = platform.system() == "Linux" and shutil.which("nvidia-smi") is None
    if wanted and cpu_index_answers():
        print("--index-url", CPU_INDEX)
