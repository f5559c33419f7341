"""How much memory is free: what a pool of KV is measured by unless it is told."""

from __future__ import annotations

from pathlib import Path

import torch

_ROOT = Path("/")


def quarter_of_free_memory(device: torch.device, root: Path = _ROOT) -> int:
    """Bytes. Of a GPU's memory; else of what this machine and the process's control group have left.

    root: where /proc and /sys are found.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    free = _available(root)
    group = _control_group(root)
    limit = _text(group / "memory.max")
    if limit.isdecimal():
        used = int(_text(group / "memory.current")) - _field(group / "memory.stat", "inactive_file")
        free = min(free, int(limit) - used)
    return max(0, free) // 4


def _available(root: Path) -> int:
    """What could be had without swapping: free pages, and cached files that can be dropped."""
    return _field(root / "proc/meminfo", "MemAvailable:") * 1024


def _field(path: Path, name: str) -> int:
    """The number behind a name that begins a line."""
    for line in path.read_text().splitlines():
        found, number, *_ = line.split()
        if found == name:
            return int(number)
    raise RuntimeError(f"{path} has no {name}")


def _control_group(root: Path) -> Path:
    """Of cgroup v2, the only version whose limits count. In a container it is mounted as the root."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            own = root / "sys/fs/cgroup" / line.removeprefix("0::").lstrip("/")
            if own.exists():
                return own
    return root / "sys/fs/cgroup"


def _text(path: Path) -> str:
    """Empty for no such file, as the root group has no limits."""
    return path.read_text().strip() if path.exists() else ""
