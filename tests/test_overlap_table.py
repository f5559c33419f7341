"""What the overlap benchmark makes of its runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from closed_forms import Site, best, top  # benchmarks/closed_forms.py
from overlap import choices  # benchmarks/overlap.py
from overlap_table import Cell, Run, markdown, summary  # benchmarks/overlap_table.py

from splitspec.types import Mode

PLAIN = Run("plain", 0, 100, 36.0, closed_form=40.0)
SEQUENTIAL = Run("sequential", 4, 100, 60.0, 0.8, 0.0, 64.0, round_ms=52.0, closed_round_ms=49.4)
PUSH = Run("prefetch_push", 6, 100, 90.0, 0.79, 0.75, 100.0)
SLOW_PUSH = replace(PUSH, k=7, tokens_per_s=70.0, closed_form=99.0)
CONTROLLER = Run("controller", None, 100, 81.0)
CELL = Cell(0.8, 20.0, (PLAIN, SEQUENTIAL, PUSH, SLOW_PUSH, CONTROLLER), (0.5, 0.9, 0.7))


def test_ratios_of_a_cell() -> None:
    assert CELL.best_fixed is PUSH
    assert CELL.best_of("prefetch_push") is PUSH
    assert CELL.ratios == {
        "sequential_vs_closed_form": pytest.approx(0.95),
        "best_vs_closed_form": 0.9,
        "controller_vs_best_fixed": 0.9,
        "controller_vs_plain": 2.25,
    }


def test_the_controller_is_no_fixed_choice() -> None:
    fast = replace(CELL, runs=(*CELL.runs[:-1], replace(CONTROLLER, tokens_per_s=120.0)))
    assert fast.best_fixed is PUSH
    assert fast.ratios["controller_vs_best_fixed"] == pytest.approx(4 / 3)


def test_the_last_line_has_the_worst_cells_and_the_median_of_all_rounds() -> None:
    near = replace(CELL, round_trip_ms=5.0, overhead_ms=(2.0, 3.0))
    near = replace(near, runs=(*CELL.runs[:-1], replace(CONTROLLER, tokens_per_s=45.0)))
    assert summary([CELL, near]) == {
        "sequential_vs_closed_form": 0.95,
        "best_vs_closed_form": 0.9,
        "controller_vs_best_fixed": 0.5,
        "controller_vs_plain": 1.25,
        "overhead_ms_p50": 0.9,
    }


def test_sequential_rounds_of_short_round_trips_are_not_compared() -> None:
    late = replace(SEQUENTIAL, round_ms=500.0)
    short = Cell(0.8, 0.5, (PLAIN, late, CONTROLLER))
    assert "sequential_vs_closed_form" not in short.ratios
    assert summary([short, CELL])["sequential_vs_closed_form"] == 0.95


def test_the_table_for_people_has_every_run() -> None:
    text = markdown([CELL])
    assert text.count("\n") == 1 + len(CELL.runs)
    assert "| 0.8 | 20 | sequential | 4 | 60.0 | 64.0 | 0.94 | 0.800 |  | 52.00 | 49.40 |" in text
    assert "| 0.8 | 20 | **prefetch_push** | 6 | 90.0 | 100.0 | 0.90 | 0.790 | 0.75 |  |  |" in text
    assert "| 0.8 | 20 | controller |  | 81.0 |  |  |  |  |  |  |" in text


@pytest.mark.parametrize("acceptance", [0.6, 0.95])
def test_every_mode_and_the_three_best_choices_are_measured_once(acceptance: float) -> None:
    site = Site(acceptance, 3.0, 25.0, 0.3, 20.0, hit_rate=0.8)
    found = choices(site)
    assert len(set(found)) == len(found)
    assert set(found) == {best(mode, site) for mode in Mode} | set(top(site, 3))
