"""How much faster one way is than another on the same questions, with a bootstrap over the questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Work:
    """What one way made of a question: tokens, and the seconds that they took."""

    tokens: int
    seconds: float

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.seconds + other.seconds)


@dataclass(frozen=True)
class Speedup:
    """A ratio of tokens per second; low and high: its 95 % interval, None with fewer than two questions."""

    value: float
    low: float | None = None
    high: float | None = None


def tokens_per_second(works: Sequence[Work]) -> float:
    """All tokens over all seconds, so that a question counts by the time that it takes."""
    return sum(work.tokens for work in works) / sum(work.seconds for work in works)


def speedup(ours: Sequence[Work], theirs: Sequence[Work], resamples: int = 4000, seed: int = 0) -> Speedup:
    """How often the tokens per second of `theirs` go into those of `ours`; entry i of both is question i.

    The interval is the percentile bootstrap's: a resample draws questions, and takes both works of each, so
    that what makes a question slow for both doesn't widen it (Efron and Tibshirani, An Introduction to the
    Bootstrap, 1993, chapters 8 and 13). Raises ValueError when the lengths differ or there is no question.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} works, expected one of each for every question")
    value = tokens_per_second(ours) / tokens_per_second(theirs)
    count = len(ours)
    if count < 2:
        return Speedup(value)
    # [4, questions]: our tokens and seconds, their seconds and tokens
    pairs = zip(ours, theirs, strict=True)
    columns = np.array([(a.tokens, a.seconds, b.seconds, b.tokens) for a, b in pairs]).T
    draws = np.random.default_rng(seed).integers(count, size=(resamples, count))
    tokens, seconds, their_seconds, their_tokens = columns[:, draws].sum(axis=-1)
    low, high = np.quantile((tokens / seconds) * (their_seconds / their_tokens), [0.025, 0.975])
    return Speedup(value, float(low), float(high))
