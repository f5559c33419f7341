"""Weights in huge pages: with small ones a pass spends a quarter of its time on looking up addresses."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path

import numpy as np

_SIZE = 2 << 20
#: <linux/mman.h>: of those two the second moves what is there at once (Linux 6.1 and later).
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_AREA = re.compile(r"(?P<first>[0-9a-f]+)-(?P<last>[0-9a-f]+) rw-p \S+ \S+ 0 +(?:\[heap\])?\s*$")


def use_huge_pages() -> int:
    """Ask the kernel to move what this process holds in memory to huge pages; bytes that it has moved.

    What is mostly untouched, as a pool of KV is, stays as it is. Where the kernel doesn't offer it, or before
    Linux 6.1, nothing happens at once: 0.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None)
    for name in ("madvise", "mincore"):
        getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    moved = 0
    for first, last in _areas():
        touched = np.zeros((last - first) // mmap.PAGESIZE, dtype=np.uint8)
        if libc.mincore(first, last - first, touched.ctypes.data) != 0:
            continue  # gone in the meantime
        mostly = (touched & 1).reshape(-1, _SIZE // mmap.PAGESIZE).mean(axis=1) > 0.5
        for start, stop in _runs(mostly):
            address, length = first + start * _SIZE, (stop - start) * _SIZE
            libc.madvise(address, length, _MADV_HUGEPAGE)
            if libc.madvise(address, length, _MADV_COLLAPSE) == 0:
                moved += length
    return moved


def _areas() -> list[tuple[int, int]]:
    """Bounds of private memory that no file is behind, on huge pages."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if area := _AREA.match(line):
            first = -(-int(area["first"], 16) // _SIZE) * _SIZE
            last = int(area["last"], 16) // _SIZE * _SIZE
            if first < last:
                found.append((first, last))
    return found


def _runs(chosen: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of each stretch of True."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
