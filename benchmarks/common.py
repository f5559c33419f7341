"""What every benchmark notes about itself."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from splitspec import worker_environment as worker_environment  # import this module before torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, cores and versions."""
    import torch
    import transformers

    processor = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            processor = line.partition(":")[2].strip()
            break
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def save_result(name: str, result: dict[str, Any], *, quick: bool) -> Path:
    """Write results/NAME[-quick].json with the commit, the command line and the time."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=True,
        cwd=RESULTS.parent,
    ).stdout.strip()
    command = ["python", f"benchmarks/{name}.py", *sys.argv[1:]]
    noted = {
        "commit": commit,
        "command": " ".join(command),
        "date": datetime.now(UTC).date().isoformat(),
        **result,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{'-quick' if quick else ''}.json"
    path.write_text(json.dumps(noted, indent=2) + "\n")
    return path
