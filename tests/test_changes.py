"""When a run of changes.py counts as settled, and when as steady."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from changes import Change, Did, summary  # benchmarks/changes.py


def change(*rounds: tuple[int, str, float], name: str = "any") -> Change:
    """rounds: how many, which mode (with K = 4), and what they are worth; "try" for a try."""
    after = [
        Did(0.0, "plain" if mode == "try" else mode, 4, 1, tried=mode == "try", worth=worth)
        for count, mode, worth in rounds
        for _ in range(count)
    ]
    return Change(name, (), tuple(after))


@pytest.mark.parametrize(
    ("rounds", "settled", "steady"),
    [
        ([(40, "push", 1.0)], 0, 0),
        ([(7, "plain", 0.5), (40, "push", 0.95)], 7, 7),
        # Another choice, which is worth nearly as much.
        ([(12, "pull", 0.92), (40, "push", 0.97)], 0, 12),
        # One round in ten may be anything, and a try counts as nothing.
        ([(20, "push", 1.0), (1, "plain", 0.5), (1, "try", 0.1), (20, "push", 1.0)], 0, 0),
        ([(20, "push", 1.0), (8, "plain", 0.5), (20, "push", 1.0)], 28, 28),
        ([(30, "push", 1.0), (6, "plain", 0.5)], None, None),
        ([(3, "try", 0.1), (40, "push", 1.0)], 3, 3),
    ],
)
def test_settled_and_steady(
    rounds: Sequence[tuple[int, str, float]], settled: int | None, steady: int | None
) -> None:
    run = change(*rounds)
    assert run.settled == settled
    assert run.steady == steady


def test_the_summary_has_the_median_and_the_worst() -> None:
    runs = [change((n, "plain", 0.5), (40, "push", 1.0), name="load") for n in (3, 9, 4)]
    expected = {"load_settled_median": 4, "load_settled_worst": 9}
    assert summary(runs) == expected | {"load_steady_median": 4, "load_steady_worst": 9}
    never = change((40, "push", 0.5), name="load")
    assert summary([*runs, never])["load_settled_worst"] is None
