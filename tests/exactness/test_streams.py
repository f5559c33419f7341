"""The streams of randomness are uniform and independent: chi-squared over fixed seeds, so never by chance.

About 300,000 integers; a bias of 1 % TV in 16 cells gives z = 12. |z| > 4.5 happens to a good generator once
in 150,000 statistics, and 46 are looked at: such a generator had a chance of 1 in 3,000 of failing when the
seeds were fixed.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from splitspec.sampling.randomness import CounterNoise, Purpose

MAX_Z = 4.5
AXES = ("seed", "round", "index", "purpose")
#: Those of a round. Shared noise has no rounds; its law is in test_sampler.py.
PURPOSES = (Purpose.DRAFT, Purpose.ACCEPTANCE, Purpose.RESIDUAL, Purpose.NEXT)


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    """[64 seeds, 64 rounds, 18 indices, 4 purposes] uint64, as CounterNoise gives them."""
    return np.array(
        [
            [
                [[noise.below(index, purpose, 2**64) for purpose in PURPOSES] for index in range(18)]
                for noise in (CounterNoise(seed, round_number) for round_number in range(64))
            ]
            for seed in range(64)
        ],
        dtype=np.uint64,
    )


def z_of_cells(cells: np.ndarray, count: int) -> float:
    """How far the cells ([n] integers below count) are from uniform: chi-squared as a standard normal.

    Wilson and Hilferty, "The distribution of chi-square", PNAS 17, 1931.
    """
    expected = len(cells) / count
    chi_squared = ((np.bincount(cells, minlength=count) - expected) ** 2).sum() / expected
    spread = 2 / (9 * (count - 1))
    return float(((chi_squared / (count - 1)) ** (1 / 3) - (1 - spread)) / spread**0.5)


def bits(values: np.ndarray, lowest: int, width: int) -> np.ndarray:
    """[n] the `width` bits of each value from bit `lowest` on."""
    cut: np.ndarray = (values.ravel() >> np.uint64(lowest)).astype(np.int64) & (2**width - 1)
    return cut


def z_of_pairs(a: np.ndarray, b: np.ndarray) -> float:
    """How far pairs of values are from independent and uniform, by their top five bits."""
    return z_of_cells(32 * bits(a, 59, 5) + bits(b, 59, 5), 1024)


def statistics(values: np.ndarray) -> dict[str, float]:
    """z of each statistic."""
    found = {}
    for lowest in range(0, 64, 4):
        found[f"bits {lowest}-{lowest + 3}"] = z_of_cells(bits(values, lowest, 4), 16)
    found["top ten bits"] = z_of_cells(bits(values, 54, 10), 1024)
    for axis, name in enumerate(AXES):
        moved = np.moveaxis(values, axis, 0)
        for i in range(min(4, len(moved))):
            found[f"{name} {i}"] = z_of_cells(bits(moved[i], 60, 4), 16)
        found[f"neighbours by {name}"] = z_of_pairs(moved[0::2], moved[1::2])
    for a, b in itertools.combinations(range(len(PURPOSES)), 2):
        found[f"purposes {a} and {b}"] = z_of_pairs(values[..., a], values[..., b])
    for first, second in itertools.combinations(range(3), 2):
        # One more in one coordinate against one more in the other, on disjoint pairs.
        moved = np.moveaxis(values, (first, second), (0, 1))
        found[f"{AXES[first]} against {AXES[second]}"] = z_of_pairs(moved[1::2, 0::2], moved[0::2, 1::2])
    return found


def assert_uniform_and_independent(values: np.ndarray) -> None:
    assert len(np.unique(values)) == values.size
    assert {name: z for name, z in statistics(values).items() if abs(z) > MAX_Z} == {}


def test_streams_are_uniform_and_independent(values: np.ndarray) -> None:
    assert_uniform_and_independent(values)


def test_rejects_streams_that_are_shared_or_biased(values: np.ndarray) -> None:
    """The statistic that is meant for a mistake sees it."""
    seed_plus_index = (np.arange(64)[:, None] + np.arange(18)) % 64
    tilted = (values / 2**64) ** 1.03
    mistakes = {
        "purposes 0 and 1": np.broadcast_to(values[..., :1], values.shape),
        "neighbours by round": np.broadcast_to(values[:, :1], values.shape),
        "seed against index": values[seed_plus_index, :, 0].swapaxes(1, 2),
        "bits 36-39": values & np.uint64(2**64 - 2**40),
        "bits 60-63": (tilted * 2**53).astype(np.uint64) << np.uint64(11),
    }
    for name, wrong in mistakes.items():
        assert wrong.shape == values.shape
        assert statistics(wrong)[name] > 2 * MAX_Z, name
