"""Files that are read again while the gateway runs, by a path that somebody may have put anything at."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(file: Path) -> bytes:
    """Content of a regular file. Raises `OSError` also for a pipe or a device: they may never end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file")
        return opened.read()
