"""Free memory: the machine's, or less where a control group has a limit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitspec.engine.memory import quarter_of_free_memory

CPU = torch.device("cpu")
MEMINFO = "MemTotal: 8000 kB\nMemFree: 100 kB\nMemAvailable: 4000 kB\n"


def machine(root: Path, group: str = "0::/", files: dict[str, str] | None = None) -> Path:
    for path, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": group, **(files or {})}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


def test_what_can_be_dropped_counts_as_free(tmp_path: Path) -> None:
    assert quarter_of_free_memory(CPU, machine(tmp_path)) == 1000 * 1024


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("2048000", "1024000", 260_000), ("max", "1024000", 1_024_000), ("1024000", "1040001", 0)],
)
@pytest.mark.parametrize("own", ["", "pods/a"])
def test_a_limit_of_the_group_counts(tmp_path: Path, own: str, limit: str, used: str, expected: int) -> None:
    files = {
        f"sys/fs/cgroup/{own}/memory.max": limit,
        f"sys/fs/cgroup/{own}/memory.current": used,
        f"sys/fs/cgroup/{own}/memory.stat": "anon 7\ninactive_file 16000\nactive_file 5",
    }
    assert quarter_of_free_memory(CPU, machine(tmp_path, f"0::/{own}", files)) == expected


def test_this_machine() -> None:
    assert quarter_of_free_memory(CPU) > 0
