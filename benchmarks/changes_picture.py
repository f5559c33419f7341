"""The picture of changes.py: what a request does, round by round, around a change of its conditions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from changes import Change, Did  # benchmarks/changes.py
from matplotlib.axes import Axes
from matplotlib.figure import Figure

TITLES = {
    "round_trip": "round trip from 1 to 50 ms",
    "acceptance": "acceptance from 0.9 to 0.4",
    "load": "from 1 to 32 sessions",
}
COLORS = {
    "plain": "C7",
    "sequential": "C4",
    "pipelined": "C3",
    "prefetch_pull": "C2",
    "prefetch_push": "C0",
}
_SMOOTHED = 8


def draw(runs: Sequence[Change], path: Path) -> None:
    """The first run of each change: mode and K above, tokens/s below."""
    firsts = {run.name: run for run in reversed(runs)}
    shown = [firsts[name] for name in TITLES]
    figure = Figure(figsize=(5.5 * len(shown), 6), layout="constrained")
    panels = figure.subplots(2, len(shown), squeeze=False, sharex="col")
    for upper, lower, run in zip(*panels, shown, strict=True):
        _choices(upper, run)
        _speed(lower, run)
        upper.set_title(TITLES[run.name])
        lower.set_xlabel("rounds since the change")
        for panel in (upper, lower):
            panel.axvline(0, color="grey", linewidth=1)
            if run.settled is not None:
                panel.axvline(run.settled, color="grey", linestyle=":")
    panels[0][0].set_ylabel("draft tokens asked for; hollow: a try")
    panels[1][0].set_ylabel("tokens/s over the last rounds")
    figure.savefig(path, dpi=110)


def _numbered(run: Change) -> list[tuple[int, Did]]:
    return list(enumerate([*run.before, *run.after], start=-len(run.before)))


def _choices(panel: Axes, run: Change) -> None:
    rounds = _numbered(run)
    for mode, color in COLORS.items():
        for tried, fill in ((False, color), (True, "none")):
            shown = [(n, did.k) for n, did in rounds if did.mode == mode and did.tried is tried]
            places, lengths = [n for n, _ in shown], [k for _, k in shown]
            panel.plot(places, lengths, "o", color=color, mfc=fill, label=None if tried else mode)
    panel.set_ylim(bottom=-0.5)
    panel.legend(fontsize="small")


def _speed(panel: Axes, run: Change) -> None:
    rounds = _numbered(run)
    places, speeds = [], []
    for end in range(_SMOOTHED, len(rounds)):
        (_, first), *rest = rounds[end - _SMOOTHED : end + 1]
        places.append(rest[-1][0])
        speeds.append(sum(did.tokens for _, did in rest) / (rest[-1][1].at_s - first.at_s))
    panel.plot(places, speeds)
    panel.set_ylim(bottom=0)
