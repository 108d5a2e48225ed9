"""How the process keeps its memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def tune_memory() -> None:
    """Settings of the process that the data path was measured with.

    glibc gives large buffers back to the kernel at once and faults them in again for the next body; keeping up to 64
    MiB removed the page faults that made 256 KB bodies two to three times dearer. Objects made so far live as long as
    the process, so the garbage collector need not look at them again. It runs when 2,000 new ones have piled up, looks
    at ten times as many every tenth time, and hardly ever at all: a run takes 0.4 µs an object, and 5,000 streams that
    begin at once once made it stop the loop for 80 ms. What it finds comes from the control plane's HTTP client; the
    data path makes no cycles.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
        libc.mallopt(m_mmap_threshold, 32 * 2**20)
        libc.mallopt(m_trim_threshold, 64 * 2**20)
        libc.mallopt(m_top_pad, 4 * 2**20)
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 10, 500)
