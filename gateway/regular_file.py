"""Files that are read again while the gateway runs, by a path that somebody may have put anything at."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 4 * 2**20
"""Some 20,000 keys. Whatever is larger is another file, and would take seconds to be understood."""


def read_regular(file: Path) -> bytes:
    """Content of a regular file. Raises `OSError` also for a pipe or a device, which may never end, and where there is
    too much."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file")
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"Larger than {MAX_BYTES // 2**20} MiB")
    return content
