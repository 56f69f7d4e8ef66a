"""Reading files that a user names and that are small by nature: settings, costs, scenarios."""

import errno
from pathlib import Path

MAX_BYTES = 16 << 20


def read_bounded(path: Path) -> bytes:
    """The content. Raises `OSError` if it cannot be read, or has more than `MAX_BYTES` (a device may never
    end)."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_BYTES:,} bytes", str(path))
    return content
