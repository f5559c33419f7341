"""Counter-based randomness: a value is a function of (request seed, round, index, purpose) alone.

Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3):
key = (seed, purpose), counter = (1, 0, index, round), the first word of the block. Nothing depends on
the composition of a batch, on the replica that ran the round, or on how many values another purpose took.

The noise that draft and target share is keyed by absolute position instead: key = (seed, SHARED), and the
word of token i is word i % 4 of the block of counter (1 + i // 4, 0, position, 0).
"""

from __future__ import annotations

import enum
import math
from typing import Protocol

import numpy as np
import torch


class Purpose(enum.IntEnum):
    """What a random value is for; each purpose is a stream of its own."""

    DRAFT = 1
    ACCEPTANCE = 2
    RESIDUAL = 3
    NEXT = 4
    SHARED = 5


def raw64(seed: int, round_number: int, index: int, purpose: Purpose) -> int:
    """A uniform 64-bit integer."""
    # numpy raises the counter before it computes a block.
    counter = np.array([0, 0, index, round_number], dtype=np.uint64)
    key = np.array([seed, purpose], dtype=np.uint64)
    return int(np.random.Philox(counter=counter, key=key).random_raw())


def unit(raw: int) -> float:
    """The float64 in [0, 1), on the grid of 2**-53, of a uniform 64-bit integer."""
    return (raw >> 11) * 2.0**-53


def below(raw: int, bound: int) -> int:
    """The integer below `bound` of a uniform 64-bit integer: the multiply-shift."""
    return (raw * bound) >> 64


def uniform(seed: int, round_number: int, index: int, purpose: Purpose) -> float:
    """A uniform float64 in [0, 1)."""
    return unit(raw64(seed, round_number, index, purpose))


def accepts(u: float, numerator: float, denominator: float) -> bool:
    """Whether u < numerator / denominator, for u in [0, 1): strict, so a numerator of 0 never passes."""
    return u * denominator < numerator


def invert(u: float, weights: torch.Tensor) -> int:
    """The index whose share of the cumulated weights holds u: the inverse of their distribution function.

    weights: [n] float64, at least 0, not all 0; they need not sum to 1. u in [0, 1).
    An index of weight 0 is never returned: such indices are left out before cumulating, because a
    parallel sum may round differently from one entry to the next.
    """
    support = torch.nonzero(weights).flatten()
    cumulated = torch.cumsum(weights[support], dim=0)
    total = float(cumulated[-1]) if support.numel() else 0.0
    if not total > 0:
        raise ValueError(f"the weights sum to {total}, expected more than 0")
    index = int(torch.searchsorted(cumulated, u * total, right=True))
    # u * total rounds to the total itself when that is subnormal.
    return int(support[min(index, support.numel() - 1)])


def shared_words(seed: int, position: int, count: int) -> np.ndarray:
    """[count] uint64: the raw integers of tokens 0 to count - 1 at an absolute position."""
    counter = np.array([0, 0, position, 0], dtype=np.uint64)
    key = np.array([seed, Purpose.SHARED], dtype=np.uint64)
    words: np.ndarray = np.random.Philox(counter=counter, key=key).random_raw(count)
    return words


def race(words: np.ndarray, weights: np.ndarray) -> int:
    """The first to arrive when token i arrives at -ln U_i / weights[i]: i wins with its share of the weights.

    U = (k + 1/2) / 2**52 with k the upper 52 bits of a word: never 0 or 1, and fine enough for rare tokens.
    words: [n] uint64. weights: [n] float64, at least 0, not all 0. A weight of 0 never wins; ties go to the
    lowest id.
    """
    largest = float(weights.max())
    if not largest > 0:
        raise ValueError(f"the largest weight is {largest}, expected more than 0")
    u = _open_units(words)
    rates = weights / largest
    with np.errstate(divide="ignore", over="ignore"):
        # -ln U is at least 1 - U, so that few of the logarithms are needed.
        earliest = (1 - u) / rates

    def arrival(token: int) -> float:
        return -math.log(float(u[token])) / float(rates[token])

    # More than what rounding takes from the bound.
    limit = arrival(int(earliest.argmin())) * (1 + 2.0**-40)
    return min(np.flatnonzero(earliest <= limit).tolist(), key=arrival)


def delays(words: np.ndarray) -> np.ndarray:
    """[n] float64: the -ln U_i of a race. Who arrives first has the largest weights[i] / delays[i]."""
    found: np.ndarray = -np.log(_open_units(words))
    return found


def _open_units(words: np.ndarray) -> np.ndarray:
    """[n] float64 in (0, 1), of [n] uint64."""
    units: np.ndarray = ((words >> np.uint64(12)) + 0.5) * 2.0**-52
    return units


class Noise(Protocol):
    """Randomness as the rules ask for it; tests pass one that walks through every outcome."""

    def accepts(self, index: int, numerator: float, denominator: float) -> bool:
        """Accept draft token `index` with probability min(1, numerator / denominator)."""
        ...

    def draw(self, index: int, purpose: Purpose, weights: torch.Tensor) -> int:
        """Draw an index with probability proportional to weights ([n] float64)."""
        ...

    def race(self, position: int, weights: torch.Tensor) -> int:
        """The winner at an absolute position: the same for whoever races the same weights there."""
        ...


class CounterNoise:
    """The service's noise for one round."""

    def __init__(self, seed: int, round_number: int) -> None:
        self.seed = seed
        self.round_number = round_number

    def accepts(self, index: int, numerator: float, denominator: float) -> bool:
        return accepts(
            uniform(self.seed, self.round_number, index, Purpose.ACCEPTANCE), numerator, denominator
        )

    def draw(self, index: int, purpose: Purpose, weights: torch.Tensor) -> int:
        return invert(uniform(self.seed, self.round_number, index, purpose), weights)

    def below(self, index: int, purpose: Purpose, bound: int) -> int:
        """A uniform integer below `bound`."""
        return below(raw64(self.seed, self.round_number, index, purpose), bound)

    def race(self, position: int, weights: torch.Tensor) -> int:
        """The same in every round: a function of seed, position and weights ([vocabulary] float64) alone."""
        return race(shared_words(self.seed, position, len(weights)), weights.cpu().numpy())
