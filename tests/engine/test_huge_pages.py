"""Huge pages: what is in memory moves, what is untouched stays untouched."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from splitspec.engine.huge_pages import use_huge_pages

MIB = 1 << 20
_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    not _MODES.exists() or "[never]" in _MODES.read_text(), reason="the kernel has no huge pages to give"
)


def resident(field: str) -> int:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def test_touched_memory_moves_and_untouched_stays() -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 64 * MIB, flags) as touched:
        touched[:] = b"\1" * len(touched)
        guard = mmap.mmap(-1, 4096, flags, mmap.PROT_READ)  # so that the two don't become one area
        with mmap.mmap(-1, 256 * MIB, flags) as untouched:
            huge, held = resident("AnonHugePages:"), resident("Rss:")
            moved = use_huge_pages()
            assert moved >= 60 * MIB
            assert resident("AnonHugePages:") - huge >= 60 * MIB
            assert resident("Rss:") - held < 32 * MIB
            assert touched[:3] == b"\1\1\1"
            assert len(untouched) == 256 * MIB
        guard.close()
