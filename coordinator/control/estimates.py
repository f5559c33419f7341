"""What the control knows: running estimates from rounds, robust to a machine that stalls now and then.

`Shared` keeps those of workers and drafters across requests. A session has its own acceptance and hit rate,
which start from its drafter's.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import TypeVar

from coordinator.control.seen import Answer
from splitspec.types import MAX_NUM_DRAFT_TOKENS

#: Guesses for a drafter that was never seen. Hopeful ones: what is tried is measured, what isn't never is.
_FIRST_ACCEPTANCE = 0.8
_FIRST_HIT_RATE = 0.7
#: No draft token is certain: a run of accepted ones must not make K pointless to measure.
_MOST_ACCEPTANCE = 0.99
#: Workers and drafters that are kept, the last used ones.
_MOST_KEPT = 256


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

    def add(self, x: float, y: float) -> None:
        if not self.known:
            self._begin(x, y)
            return
        error = y - (self._intercept + self._slope * x)
        noise = (self._NOISE * max(y, self(x))) ** 2
        self._p00 += self._DRIFT**2 / self._NOISE**2 * noise
        self._p11 = min(self._p11 + self._SLOPE_DRIFT**2 * self._most_p11, self._most_p11)
        spread = self._p00 + 2 * x * self._p01 + x * x * self._p11 + noise
        if error * error > self._FAR**2 * spread:
            self._far = not self._far
            if self._far:
                return
            self._p00 += error * error
            spread += error * error
        else:
            self._far = False
        along, across = self._p00 + x * self._p01, self._p01 + x * self._p11
        self._intercept += along / spread * error
        self._slope += across / spread * error
        self._p00 -= along * along / spread
        self._p01 -= along * across / spread
        self._p11 -= across * across / spread

    def _begin(self, x: float, y: float) -> None:
        self._intercept = y / (1 + self._ratio * x)
        self._slope = self._ratio * self._intercept
        self._p00 = (0.5 * self._intercept) ** 2
        self._p11 = self._most_p11 = self._slope**2
        self.known = True


class Recent:
    """The median of the last few samples: follows a jump within four, and no stall."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=7)
        self._median: float | None = None

    def add(self, sample: float | None) -> None:
        if sample is not None:
            self._samples.append(sample)
            self._median = statistics.median(self._samples)

    def value(self, default: float) -> float:
        return default if self._median is None else self._median


class Ratio:
    """How often something happens, exponentially weighted over trials; a guess counts as `weight` of them."""

    def __init__(self, decay: float, weight: float = 2.0) -> None:
        self._decay = decay
        self._weight = weight
        self._times = 0.0
        self.trials = 0.0

    def add(self, happened: float, trials: float = 1.0) -> None:
        self.trials = self.trials * self._decay + trials
        self._times = self._times * self._decay + happened

    def value(self, base: float) -> float:
        return (self._times + self._weight * base) / (self.trials + self._weight)


class Acceptance:
    """P(draft token i is there and accepted | those before it were), i from 1, weighted over rounds.

    Depths that are seldom reached lean on the depth before, and on how the drafter's depths compare: when a
    session's first tokens fail, so will the later ones that it doesn't see any more.
    """

    def __init__(self, decay: float, prior: Acceptance | None = None) -> None:
        self._prior = prior
        self._depths = [Ratio(decay) for _ in range(MAX_NUM_DRAFT_TOKENS)]
        self._values: tuple[float, ...] | None = None

    def add(self, num_asked: int, num_accepted: int) -> None:
        """A shorter proposal than asked for counts as a failure where it ends."""
        if self._prior is not None:
            self._prior.add(num_asked, num_accepted)
        for depth, ratio in enumerate(self._depths):
            if depth < num_accepted:
                ratio.add(1)
            else:  # those behind the failure age too
                ratio.add(0, trials=float(depth == num_accepted < num_asked))
        self._values = None

    @property
    def trials(self) -> float:
        """Draft tokens that it knows of, at all depths."""
        return sum(ratio.trials for ratio in self._depths)

    @property
    def values(self) -> tuple[float, ...]:
        """For each depth."""
        if self._values is None or self._prior is not None:
            self._values = self._computed()
        return self._values

    def _computed(self) -> tuple[float, ...]:
        guesses = (
            self._prior.values if self._prior is not None else (_FIRST_ACCEPTANCE,) * MAX_NUM_DRAFT_TOKENS
        )
        values: list[float] = []
        value = before = guesses[0]
        for ratio, guess in zip(self._depths, guesses, strict=True):
            value = min(ratio.value(value * guess / before), _MOST_ACCEPTANCE)
            values.append(value)
            before = guess
        return tuple(values)


class Drafter:
    """What is known of a drafter, on whatever worker and from all sessions: the start of a new one."""

    def __init__(self) -> None:
        self.acceptance = Acceptance(decay=0.98)
        self.hits = Ratio(decay=0.98)

    @property
    def hit_rate(self) -> float:
        return self.hits.value(_FIRST_HIT_RATE)


class Draft:
    """What is known of one drafter on one draft worker."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        #: ms of a proposal, queue included, over its draft tokens: nearly all of it is per token.
        self.proposal = Line(slope_per_intercept=20.0)
        #: ms per draft token of a proposal that was prepared, all its branches together.
        self.branch = Recent()
        self.round_trip = Recent()

    def saw(self, num_draft_tokens: int, answer: Answer, prepared: bool) -> None:
        self.round_trip.add(answer.round_trip_ms)
        if not num_draft_tokens:
            return
        if prepared:
            self.branch.add((answer.queue_ms + answer.busy_ms) / (num_draft_tokens + 1))
        else:
            self.proposal.add(num_draft_tokens, answer.queue_ms + answer.busy_ms)


class Target:
    """What is known of one target worker, and the positions that this coordinator's sessions have on it.

    A pass is shared: its time is a line over the positions of all sessions, so that what one more position
    costs is known with one session's price and the number of sessions that follow the same rule.
    """

    def __init__(self) -> None:
        #: ms of a pass, without the queue, over the positions in it.
        self.busy = Line(slope_per_intercept=0.02)
        self.round_trip = Recent()
        self._queues = {True: Ratio(0.85, weight=0.1), False: Ratio(0.85, weight=0.1)}
        self._positions: dict[Hashable, int] = {}
        self._sum = 0

    @property
    def sessions(self) -> int:
        return max(1, len(self._positions))

    def place(self, session: Hashable, positions: int) -> None:
        """The session's next pass has so many positions; 0: it has left."""
        self._sum += positions - self._positions.pop(session, 0)
        if positions:
            self._positions[session] = positions

    def saw(self, session: Hashable, num_draft_tokens: int, answer: Answer) -> None:
        others = self._sum - self._positions.get(session, 0)
        self.busy.add(others + num_draft_tokens + 1, answer.busy_ms)
        self.round_trip.add(answer.round_trip_ms)
        if answer.busy_ms > 0:  # no more than a few passes: the rest is a stall
            self._queues[num_draft_tokens > 0].add(min(answer.queue_ms / answer.busy_ms, 4.0))

    def queue(self, drafted: bool) -> float:
        """Wait before a pass, in passes. Plain tokens that were granted ahead hardly wait, proposals do."""
        return self._queues[drafted].value(0.0)

    @property
    def load(self) -> float:
        """Share of a proposal's time on the worker that it waits, 0 to 1."""
        queue = self.queue(drafted=True)
        return queue / (1 + queue)


V = TypeVar("V")


class Shared:
    """The estimates that outlive a request, one object per coordinator; the last used ones are kept."""

    def __init__(self) -> None:
        self._targets: OrderedDict[str, Target] = OrderedDict()
        self._drafters: OrderedDict[str, Drafter] = OrderedDict()
        self._drafts: OrderedDict[tuple[str, str], Draft] = OrderedDict()

    def target(self, worker_id: str) -> Target:
        return _kept(self._targets, worker_id, Target)

    def draft(self, worker_id: str, drafter: str) -> Draft:
        known = _kept(self._drafters, drafter, Drafter)
        return _kept(self._drafts, (worker_id, drafter), lambda: Draft(known))


K = TypeVar("K", bound=Hashable)


def _kept(kept: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    if key not in kept:
        kept[key] = make()
        if len(kept) > _MOST_KEPT:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key]
