"""The picture of overlap.py: tokens/s of each mode over the round trip, beside the closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from overlap_table import CONTROLLER, Cell  # benchmarks/overlap_table.py


def draw(cells: Sequence[Cell], path: Path) -> None:
    """A panel for each acceptance."""
    acceptances = list(dict.fromkeys(cell.acceptance for cell in cells))
    figure = Figure(figsize=(5.5 * len(acceptances), 5), layout="constrained")
    panels = figure.subplots(1, len(acceptances), squeeze=False)[0]
    for panel, acceptance in zip(panels, acceptances, strict=True):
        _panel(panel, [cell for cell in cells if cell.acceptance == acceptance])
        panel.set_title(f"acceptance {acceptance:g}")
    panels[0].set_ylabel("tokens/s; dotted: closed form")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _panel(panel: Axes, cells: Sequence[Cell]) -> None:
    """Solid lines are measured; dotted ones are the closed forms at the realised acceptance."""
    places = [cell.round_trip_ms for cell in cells]
    for mode in dict.fromkeys(run.mode for cell in cells for run in cell.runs):
        best = [cell.best_of(mode) for cell in cells]
        (line,) = panel.plot(places, [run.tokens_per_s for run in best], "o-", label=mode)
        if mode == CONTROLLER:
            line.set(color="black", linewidth=2.5)
            continue
        forms = [run.closed_form or float("nan") for run in best]
        panel.plot(places, forms, ":", color=line.get_color())
    panel.set_xscale("log")
    panel.set_xticks(places, [f"{place:g}" for place in places])
    panel.minorticks_off()
    panel.set_xlabel("round trip to the target, ms")
    panel.set_ylim(bottom=0)
