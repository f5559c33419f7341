"""A training's learning curve, from its log, as a PNG."""

from __future__ import annotations

import json
from pathlib import Path

from splitspec.errors import ConfigError

_CHANCES = ("greedy_1", "greedy_2", "greedy_3", "sampled_1")
_LENGTHS = ("greedy_length", "sampled_length")


def draw_curve(directory: Path) -> Path:
    """Draw `curve.png` beside `log.jsonl`: acceptance against tokens of training, on the validation split.

    Raises ConfigError without a log, or without matplotlib, which the extra `benchmarks` brings.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("matplotlib is missing, expected the extra splitspec[benchmarks]") from error
    log = read_log(directory)
    figure = Figure(figsize=(10, 4), layout="constrained")
    chances, lengths = figure.subplots(1, 2)
    for panel, names in ((chances, _CHANCES), (lengths, _LENGTHS)):
        for name in names:
            points = [(entry["tokens"], entry[name]) for entry in log if name in entry]
            if points:
                panel.plot(*zip(*points, strict=True), marker=".", label=name.replace("_", " "))
        panel.set_xlabel("tokens of answers trained on")
        panel.grid(alpha=0.3)
        panel.legend()
    chances.set_ylabel("chance that the first so many draft tokens are accepted")
    lengths.set_ylabel("tokens per pass of the target, chains of 5")
    path = directory / "curve.png"
    figure.savefig(path, dpi=120)
    return path


def read_log(directory: Path) -> list[dict[str, float]]:
    """Entries of a training's log. Raises ConfigError without one."""
    path = directory / "log.jsonl"
    if not path.is_file():
        raise ConfigError(f"directory is {str(directory)!r}, expected one of a training, with log.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
