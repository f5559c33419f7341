"""Huge pages: what is in memory moves, what is untouched stays untouched."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from splitspec.engine.huge_pages import use_huge_pages

MIB = 1 << 20
_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    not _MODES.exists() or "[never]" in _MODES.read_text(), reason="the kernel has no huge pages to give"
)


def account(area: mmap.mmap, field: str) -> int:
    """Bytes, by the kernel's account of the mappings that the area lies in."""
    first = ctypes.addressof(ctypes.c_char.from_buffer(area))
    last, total, inside = first + len(area), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        start, dash, stop = line.partition(" ")[0].partition("-")
        if dash:
            inside = int(start, 16) < last and first < int(stop, 16)
        elif inside and line.startswith(field):
            total += int(line.split()[1]) * 1024
    return total


def test_touched_memory_moves_and_untouched_stays() -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    area = mmap.mmap(-1, 320 * MIB, flags)
    area[: 64 * MIB] = b"\1" * 64 * MIB
    held = account(area, "Rss:")
    assert use_huge_pages() >= 60 * MIB
    assert account(area, "AnonHugePages:") >= 60 * MIB
    assert account(area, "Rss:") - held < 8 * MIB
    assert area[:3] == b"\1\1\1"
