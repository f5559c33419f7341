"""Running estimates from rounds, robust to a machine that stalls now and then: times, ratios, acceptance."""

from __future__ import annotations

import statistics
from collections import deque

from splitspec.types import MAX_NUM_DRAFT_TOKENS, Mode

#: A guess for a drafter that was never seen. A hopeful one: what is tried is measured, what isn't never is.
_FIRST_ACCEPTANCE = 0.8
#: No draft token is certain: a run of accepted ones must not make K pointless to measure.
_MOST_ACCEPTANCE = 0.99
_FLAT = [1.0] * MAX_NUM_DRAFT_TOKENS
#: Rounds that are taken to have been as predicted before any was, and what a round's weight is worth later.
_SKEW_ROUNDS = 10
_SKEW_DECAY = 0.96
#: Rounds without a sample after which those that there are say nothing about now.
_STALE_ROUNDS = 256


class Line:
    """y = intercept + slope * x by recursive least squares, forgetting as its coefficients may drift.

    Forgetting by drift (covariance added, not all of it scaled up) keeps the slope while x stays the same. A
    sample far from the line is left out, as a stall; the second one in a row is news, and moves the line.
    """

    _NOISE = 0.1  # of a sample, relative
    _DRIFT = 0.03  # of the intercept per sample, relative to the sample
    _SLOPE_DRIFT = 0.02  # of the slope per sample, relative to its first guess
    _FAR = 4.0  # standard deviations

    def __init__(self, slope_per_intercept: float) -> None:
        """slope_per_intercept: the first guess, while there is one sample."""
        self._ratio = slope_per_intercept
        self._intercept = self._slope = 0.0
        self._p00 = self._p01 = self._p11 = self._most_p11 = 0.0
        self._far = False
        self.known = False

    @property
    def slope(self) -> float:
        """At least 0."""
        return max(0.0, self._slope)

    @property
    def intercept(self) -> float:
        return max(0.0, self._intercept)

    def __call__(self, x: float) -> float:
        return self.intercept + self.slope * x

    def add(self, x: float, y: float) -> bool:
        """Returns whether the line knew of it: False for the first sample and for those far off."""
        if not self.known:
            self._begin(x, y)
            return False
        error = y - (self._intercept + self._slope * x)
        noise = (self._NOISE * max(y, self(x))) ** 2
        self._p00 += self._DRIFT**2 / self._NOISE**2 * noise
        self._p11 = min(self._p11 + self._SLOPE_DRIFT**2 * self._most_p11, self._most_p11)
        spread = self._p00 + 2 * x * self._p01 + x * x * self._p11 + noise
        far = error * error > self._FAR**2 * spread
        self._far = far and not self._far
        if self._far:
            return False
        if far:
            self._p00 += error * error
            spread += error * error
        along, across = self._p00 + x * self._p01, self._p01 + x * self._p11
        self._intercept += along / spread * error
        self._slope += across / spread * error
        self._p00 -= along * along / spread
        self._p01 -= along * across / spread
        self._p11 -= across * across / spread
        self._keep_positive()
        return not far

    def _keep_positive(self) -> None:
        """A coefficient below 0 is 0, and the other one what it is likely to be then: clipped alone the line
        would miss the very samples that it goes through."""
        if self._intercept < 0 < self._p00:
            self._slope -= self._p01 / self._p00 * self._intercept
            self._intercept = 0.0
        if self._slope < 0 < self._p11:
            self._intercept = max(0.0, self._intercept - self._p01 / self._p11 * self._slope)
            self._slope = 0.0

    def _begin(self, x: float, y: float) -> None:
        self._intercept = y / (1 + self._ratio * x)
        self._slope = self._ratio * self._intercept
        self._p00 = (0.5 * self._intercept) ** 2
        self._p11 = self._most_p11 = self._slope**2
        self.known = True


class Recent:
    """The median of the last few samples: follows a jump within four of a session's, and no stall.

    Samples that nobody has added to for long say nothing about now: the next one takes their place.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=7)
        self._median: float | None = None
        self._without = 0

    def last_for(self, sessions: int) -> None:
        self._samples = deque(self._samples, maxlen=7 * sessions)

    def add(self, sample: float | None) -> None:
        """Of a round; None when it has measured nothing."""
        self._without += 1
        if sample is None:
            return
        if self._without > _STALE_ROUNDS:
            self._samples.clear()
        self._without = 0
        self._samples.append(sample)
        self._median = statistics.median(self._samples)

    def value(self, default: float) -> float:
        return default if self._median is None else self._median


class Ratio:
    """How often something happens, exponentially weighted over trials; a guess counts as `weight` of them."""

    def __init__(self, decay: float, weight: float = 2.0) -> None:
        self.decay = decay
        self._weight = weight
        self._times = 0.0
        self.trials = 0.0

    def add(self, happened: float, trials: float = 1.0, decay: float | None = None) -> None:
        """decay: of what was before, another than usual."""
        decay = self.decay if decay is None else decay
        self.trials = self.trials * decay + trials
        self._times = self._times * decay + happened

    def value(self, base: float) -> float:
        return (self._times + self._weight * base) / (self.trials + self._weight)


class Acceptance:
    """P(draft token i is there and accepted | those before it were), i from 1, weighted over rounds.

    A depth has few samples of its own: it leans on all depths together, in the shape that the drafter's
    depths have. So a session whose first tokens fail expects it of the later ones, which it doesn't see.
    """

    _WEIGHT = 6.0  # of what all depths say about one, in samples
    _START = 8.0  # samples that the guess counts as in the beginning, to be forgotten like any others
    _SURPRISE = 2.5  # standard deviations of the last few rounds from which on the rest is forgotten
    _FORGET = 0.02

    def __init__(self, decay: float, prior: Acceptance | None = None) -> None:
        """decay: per round. prior: what a session starts from; only a session follows sudden changes."""
        self._decay = decay
        self._prior = prior
        self._accepted = [0.0] * MAX_NUM_DRAFT_TOKENS
        self._reached = [0.0] * MAX_NUM_DRAFT_TOKENS
        self._all = Ratio(decay)
        self._all.add(self._START * self._base, self._START)
        self._last = Ratio(0.7, weight=0.1)
        self._rounds = 0
        self._shape: list[float] | None = None

    def add(self, num_asked: int, num_accepted: int) -> None:
        """A shorter proposal than asked for counts as a failure where it ends."""
        if self._prior is not None:
            self._prior.add(num_asked, num_accepted)
        reached = min(num_accepted + 1, num_asked)
        self._last.add(num_accepted, reached)
        overall = self.overall
        surprise = abs(self._last.value(overall) - overall) * self._last.trials**0.5
        surprised = surprise > self._SURPRISE * (overall * (1 - overall)) ** 0.5
        forgets = surprised and self._prior is not None
        self._add(num_accepted, reached, self._FORGET if forgets else self._decay)

    def fade(self, decay: float) -> None:
        """A round without a draft: what isn't measured any more counts less."""
        self._add(0, 0, decay)

    def _add(self, accepted: int, reached: int, decay: float) -> None:
        self._accepted = [decay * count + (i < accepted) for i, count in enumerate(self._accepted)]
        self._reached = [decay * count + (i < reached) for i, count in enumerate(self._reached)]
        self._all.add(accepted, reached, decay)
        self._rounds += 1

    @property
    def overall(self) -> float:
        """Of all depths together."""
        return self._all.value(self._base)

    @property
    def _base(self) -> float:
        return self._prior.overall if self._prior is not None else _FIRST_ACCEPTANCE

    @property
    def values(self) -> list[float]:
        """For each depth."""
        weight, overall = self._WEIGHT, self.overall
        shape = _FLAT if self._prior is None else self._prior.shape
        return [
            min((accepted + weight * overall * relative) / (reached + weight), _MOST_ACCEPTANCE)
            for accepted, reached, relative in zip(self._accepted, self._reached, shape, strict=True)
        ]

    @property
    def shape(self) -> list[float]:
        """Each depth's over that of all together. It changes slowly, and every session asks for it."""
        if self._shape is None or self._rounds % 8 == 0:
            overall = self.overall
            self._shape = [value / overall for value in self.values]
        return self._shape


class Skew:
    """How much longer than predicted rounds of each mode take, at least 1.

    Draft worker and target may have the same cores: then what is drafted ahead slows the pass beside it,
    which is in no other estimate. Sums over rounds, exponentially weighted; the first tenth is let pass.
    """

    def __init__(self) -> None:
        self._sums: dict[Mode, tuple[float, float]] = {}
        self._decay = _SKEW_DECAY

    def last_for(self, sessions: int) -> None:
        self._decay = _SKEW_DECAY ** (1 / sessions)

    def __getitem__(self, mode: Mode) -> float:
        taken, predicted = self._sums.get(mode, (1.0, 1.0))
        return max(1.0, taken / predicted - 0.1)

    def saw(self, mode: Mode, taken_ms: float, predicted_ms: float) -> None:
        """A round of the mode. One far off, as the first of a request, counts as three."""
        start = _SKEW_ROUNDS * predicted_ms
        taken, predicted = self._sums.get(mode, (start, start))
        taken_ms = min(taken_ms, 3 * predicted_ms)
        self._sums[mode] = self._decay * taken + taken_ms, self._decay * predicted + predicted_ms

    def fade(self, decay: float) -> None:
        """A plain round: what isn't measured any more counts less beside what will be."""
        for mode, (taken, predicted) in self._sums.items():
            self._sums[mode] = decay * taken, decay * predicted

    def forget(self) -> None:
        """Begin anew: the forecasts have changed."""
        self._sums.clear()
