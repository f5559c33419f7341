"""Weights in huge pages: with small ones a pass spends a quarter of its time on looking up addresses."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

_SIZE = 2 << 20
#: <linux/mman.h>: of those two the second moves what is there at once (Linux 6.1 and later).
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HEAD = re.compile(r"(?P<first>[0-9a-f]+)-(?P<last>[0-9a-f]+) rw-p \S+ \S+ 0 +(?:\[heap\])?\s*$")


def use_huge_pages() -> int:
    """Ask the kernel to move this process's large private memory to huge pages; bytes that it has moved.

    Memory that is mostly untouched, as a pool of KV is, stays as it is. Where the kernel doesn't offer it, or
    before Linux 6.1, nothing happens at once: 0.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    moved = 0
    for first, last in _resident():
        libc.madvise(first, last - first, _MADV_HUGEPAGE)
        if libc.madvise(first, last - first, _MADV_COLLAPSE) == 0:
            moved += last - first
    return moved


def _resident() -> list[tuple[int, int]]:
    """Bounds, on huge pages, of private areas that are mostly in memory."""
    found = []
    bounds: tuple[int, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            head = _HEAD.match(line)
            bounds = (int(head["first"], 16), int(head["last"], 16)) if head else None
        elif bounds and line.startswith("Rss:"):
            first, last = -(-bounds[0] // _SIZE) * _SIZE, bounds[1] // _SIZE * _SIZE
            if first < last and int(line.split()[1]) * 1024 > 0.9 * (bounds[1] - bounds[0]):
                found.append((first, last))
    return found
