"""The picture of spec_bench.py: speed by category, and where a round's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from spec_table import ALL, PLAIN, Row  # benchmarks/spec_table.py

_PARTS = {"draft": "draft_ms", "target": "target_ms", "overhead": "overhead_ms"}


def draw(table: Sequence[Row], path: Path) -> None:
    """A panel of speeds for each temperature, and below one of rounds."""
    temperatures = list(dict.fromkeys(row.temperature for row in table))
    count = len(temperatures) + 1
    figure = Figure(figsize=(12, 4 * count), layout="constrained")
    panels = figure.subplots(count)
    for panel, temperature in zip(panels, temperatures, strict=False):
        _speeds(panel, [row for row in table if row.temperature == temperature])
        panel.set_title(f"temperature {temperature:g}: tokens/s over our plain decoding, 95 % intervals")
    panels[0].legend(ncols=2, fontsize="small")
    _rounds(panels[-1], [row for row in table if row.category == ALL and row.target_ms is not None])
    figure.savefig(path, dpi=110)


def _speeds(panel: Axes, table: Sequence[Row]) -> None:
    """Groups of bars, one group for each category."""
    categories = list(dict.fromkeys(row.category for row in table))
    arms = [arm for arm in dict.fromkeys(row.arm for row in table) if arm != PLAIN]
    width = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        own = [row for row in table if row.arm == arm]
        places = [categories.index(row.category) + (index - (len(arms) - 1) / 2) * width for row in own]
        heights = [row.over_plain.value for row in own]
        panel.bar(places, heights, width, label=arm, hatch="//" if arm.startswith("library") else "")
        ratios = [row.over_plain for row in own]
        lows, highs = [r.low or r.value for r in ratios], [r.high or r.value for r in ratios]
        panel.vlines(places, lows, highs, colors="black", linewidth=0.8)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xticks(range(len(categories)), [category.replace(" ", "\n", 1) for category in categories])


def _rounds(panel: Axes, table: Sequence[Row]) -> None:
    """Stacked bars: draft worker, target worker, everything else."""
    names = [f"{row.arm}\ntemperature {row.temperature:g}" for row in table]
    bottom = [0.0] * len(table)
    for part, field in _PARTS.items():
        heights = [getattr(row, field) for row in table]
        panel.bar(names, heights, 0.6, bottom=bottom, label=part)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    panel.set_title("a round of our service, ms")
    panel.legend(fontsize="small", loc="lower right")
