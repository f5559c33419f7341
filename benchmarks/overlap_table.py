"""What a run of overlap.py found: runs in cells of acceptance and round trip, as a table and a last line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONTROLLER, PLAIN, SEQUENTIAL = "controller", "plain", "sequential"
#: From here on sequential rounds are compared: below, a round trip is no longer than the noise of two sleeps.
_SHORTEST_ROUND_TRIP_MS = 5


@dataclass(frozen=True, slots=True)
class Run:
    """One generation. mode: a mode's name in small letters, or "controller", which chose mode and K itself.

    acceptance: of draft tokens that were reached, None without any. hit_rate: share of the proposals that
    were drafted before they were asked for. closed_form: tokens/s at both; None for the controller.
    round_ms, closed_round_ms: mean of sequential rounds, None for the others.
    """

    mode: str
    k: int | None
    tokens: int
    tokens_per_s: float
    acceptance: float | None = None
    hit_rate: float = 0.0
    closed_form: float | None = None
    round_ms: float | None = None
    closed_round_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """acceptance, round_trip_ms: as they were set. overhead_ms: of each sequential round, see overlap.py."""

    acceptance: float
    round_trip_ms: float
    runs: tuple[Run, ...]
    overhead_ms: tuple[float, ...] = ()

    @property
    def fixed(self) -> list[Run]:
        """Those whose mode and K were given."""
        return [run for run in self.runs if run.mode != CONTROLLER]

    def best_of(self, mode: str) -> Run:
        """The fastest run of a mode. Raises ValueError without any."""
        return max((run for run in self.runs if run.mode == mode), key=lambda run: run.tokens_per_s)

    @property
    def best_fixed(self) -> Run:
        return max(self.fixed, key=lambda run: run.tokens_per_s)

    @property
    def best_closed_form(self) -> float:
        return max(run.closed_form for run in self.fixed if run.closed_form is not None)

    @property
    def ratios(self) -> dict[str, float]:
        """The measures of the last line, 1 is as good as the other side."""
        controller, best = self.best_of(CONTROLLER).tokens_per_s, self.best_fixed.tokens_per_s
        found = {
            "best_vs_closed_form": best / self.best_closed_form,
            "controller_vs_best_fixed": controller / best,
            "controller_vs_plain": controller / self.best_of(PLAIN).tokens_per_s,
        }
        rounds = [(r.closed_round_ms, r.round_ms) for r in self.runs if r.round_ms and r.closed_round_ms]
        if rounds and self.round_trip_ms >= _SHORTEST_ROUND_TRIP_MS:
            found["sequential_vs_closed_form"] = min(closed / measured for closed, measured in rounds)
        return found


def summary(cells: Sequence[Cell]) -> dict[str, float]:
    """The worst cell of each measure, and the median of all overheads."""
    worst: dict[str, float] = {}
    for cell in cells:
        for name, ratio in cell.ratios.items():
            worst[name] = min(worst.get(name, ratio), ratio)
    order = (SEQUENTIAL + "_vs_closed_form", "best_vs_closed_form")
    names = [*order, "controller_vs_best_fixed", "controller_vs_plain"]
    overheads = sorted(ms for cell in cells for ms in cell.overhead_ms)
    return {name: round(worst[name], 3) for name in names if name in worst} | {
        "overhead_ms_p50": round(overheads[len(overheads) // 2], 3)
    }


def markdown(cells: Iterable[Cell]) -> str:
    """A row for each run."""
    lines = [
        "| a | R ms | mode | K | tokens/s | closed form | ratio | acceptance | hits | round ms | closed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for run in cell.runs:
            ratio = run.tokens_per_s / run.closed_form if run.closed_form else None
            shown = [
                f"{cell.acceptance:g}",
                f"{cell.round_trip_ms:g}",
                f"**{run.mode}**" if run is cell.best_fixed else run.mode,
                "" if run.k is None else str(run.k),
                f"{run.tokens_per_s:.1f}",
                _figure(run.closed_form, ".1f"),
                _figure(ratio, ".2f"),
                _figure(run.acceptance, ".3f"),
                _figure(run.hit_rate or None, ".2f"),
                _figure(run.round_ms, ".2f"),
                _figure(run.closed_round_ms, ".2f"),
            ]
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
