"""What the control knows: running estimates from rounds, robust to a machine that stalls now and then.

`Shared` keeps those of workers and drafters across requests, times by level of load. A session has its own
acceptance and hit rate, which start from its drafter's.
"""

from __future__ import annotations

import copy
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from coordinator.control.seen import Answer, RoundSeen
from splitspec.types import MAX_NUM_DRAFT_TOKENS, Mode

#: Guesses for a drafter that was never seen. Hopeful ones: what is tried is measured, what isn't never is.
_FIRST_ACCEPTANCE = 0.8
_FIRST_HIT_RATE = 0.9
#: No draft token is certain: a run of accepted ones must not make K pointless to measure.
_MOST_ACCEPTANCE = 0.99
#: What a plain round leaves of what is known about the draft, to a session and to all of them.
_FADING = 0.9
_DRAFTER_FADING = 0.9995
_FLAT = [1.0] * MAX_NUM_DRAFT_TOKENS
#: Workers and drafters that are kept, the last used ones.
_MOST_KEPT = 256
#: Rounds that are taken to have been as predicted before any was, and what a round's weight is worth later.
_SKEW_ROUNDS = 10
_SKEW_DECAY = 0.96


class Times(Protocol):
    """Estimates of times that sessions share."""

    def last_for(self, sessions: int) -> None:
        """Keep as many samples as so many sessions bring in the rounds that one session would fill it in."""
        ...


T = TypeVar("T", bound=Times)


class ByLoad(Generic[T]):
    """Estimates of times, for each level of load: sessions on the target, by powers of two.

    What was measured beside many others says little about a session alone, and a session that decodes plainly
    doesn't measure its draft. A new level starts as the next lower one, or afresh where only higher ones are
    known: so what is hopeful gets tried.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._levels: dict[int, T] = {}

    def at(self, level: int) -> T:
        if level not in self._levels:
            lower = [known for known in self._levels if known < level]
            self._levels[level] = copy.deepcopy(self._levels[max(lower)]) if lower else self._make()
            self._levels[level].last_for(2 ** max(0, level - 1))
        return self._levels[level]


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
    """The median of the last few samples: follows a jump within four of a session's, and no stall."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=7)
        self._median: float | None = None

    def last_for(self, sessions: int) -> None:
        self._samples = deque(self._samples, maxlen=7 * sessions)

    def add(self, sample: float | None) -> None:
        if sample is not None:
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


class Outcomes:
    """What a session knows of its draft: acceptance and hits, which start from its drafter's."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.acceptance = Acceptance(0.97, drafter.acceptance)
        self._hits = Ratio(0.97, weight=6.0)

    @property
    def hit_rate(self) -> float:
        return self._hits.value(self._drafter.hit_rate)

    def saw(self, seen: RoundSeen) -> None:
        if seen.num_asked:
            self.acceptance.add(seen.num_asked, seen.num_accepted)
        else:
            self._fade()
        if seen.hit is not None:
            self._hits.add(seen.hit)
            self._drafter.hits.add(seen.hit)

    def _fade(self) -> None:
        """A plain session forgets, so that bad luck with a draft isn't for good."""
        self.acceptance.fade(_FADING)
        self._hits.add(0, 0, _FADING)
        self._drafter.acceptance.fade(_DRAFTER_FADING)
        self._drafter.hits.add(0, 0, _DRAFTER_FADING)


class Drafter:
    """What is known of a drafter, on whatever worker and from all sessions: the start of a new one."""

    def __init__(self) -> None:
        self.acceptance = Acceptance(0.99)
        self.hits = Ratio(0.99, weight=6.0)
        self.records = ByLoad(Record)

    @property
    def hit_rate(self) -> float:
        return self.hits.value(_FIRST_HIT_RATE)


class Draft:
    """What is known of one drafter on one draft worker."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.times = ByLoad(DraftTimes)


class Record:
    """What rounds with a drafter were at one level of load. met: a session has begun to find out."""

    def __init__(self) -> None:
        self.met = False
        self.skew = Skew()

    def last_for(self, sessions: int) -> None:
        self.skew.last_for(sessions)


class DraftTimes:
    """What proposals of one drafter on one draft worker take at one level of load."""

    def __init__(self) -> None:
        #: ms of a proposal, queue included, over its draft tokens: nearly all of it is per token.
        self.proposal = Line(slope_per_intercept=20.0)
        #: ms per draft token of a proposal that was prepared, all its branches together.
        self.branch = Recent()
        self.round_trip = Recent()

    def last_for(self, sessions: int) -> None:
        self.branch.last_for(sessions)
        self.round_trip.last_for(sessions)

    def saw(self, num_draft_tokens: int, answer: Answer, prepared: bool) -> None:
        self.round_trip.add(answer.round_trip_ms)
        if not num_draft_tokens:
            return
        if prepared:
            self.branch.add((answer.queue_ms + answer.busy_ms) / (num_draft_tokens + 1))
        else:
            self.proposal.add(num_draft_tokens, answer.queue_ms + answer.busy_ms)


class Target:
    """What is known of one target worker.

    A pass is shared: its time is a line over the positions of all sessions in it, and what a position more
    costs is paid by all of them.
    """

    def __init__(self) -> None:
        #: ms of a pass, without the queue, over the positions in it.
        self.busy = Line(slope_per_intercept=0.02)
        self._times = ByLoad(TargetTimes)
        self._sessions: set[Hashable] = set()
        self._positions = self._own = 1.0
        #: Positions of a pass over those of the session that tells.
        self._company = Recent()

    def join(self, session: Hashable) -> None:
        self._sessions.add(session)

    def leave(self, session: Hashable) -> None:
        self._sessions.discard(session)

    @property
    def sessions(self) -> float:
        """Running sessions: those of this coordinator, or more when passes have more company."""
        return max(1.0, len(self._sessions), self._company.value(1.0))

    @property
    def level(self) -> int:
        """Of load: see ByLoad."""
        return int(self.sessions).bit_length()

    @property
    def round_trip(self) -> Recent:
        return self._times.at(self.level).round_trip

    def saw(self, num_draft_tokens: int, answer: Answer) -> None:
        own = num_draft_tokens + 1
        positions = answer.positions or own
        self._positions += 0.05 * (positions - self._positions)
        self._own += 0.05 * (own - self._own)
        self._company.add(positions / own)
        self.busy.add(positions, answer.busy_ms)
        times = self._times.at(self.level)
        times.round_trip.add(answer.round_trip_ms)
        if answer.busy_ms > 0:  # no more than a few passes: the rest is a stall
            times.queues[num_draft_tokens > 0].add(min(answer.queue_ms / answer.busy_ms, 4.0))

    @property
    def plain_ms(self) -> float:
        """What a plain token takes now, beside what others have in a pass."""
        return (1 + self.queue(drafted=False)) * self.busy(max(1.0, 1 + self._positions - self._own))

    def queue(self, drafted: bool) -> float:
        """Wait before a pass, in passes. Plain tokens that were granted ahead hardly wait, proposals do."""
        return self._times.at(self.level).queues[drafted].value(0.0)

    @property
    def load(self) -> float:
        """Share of a proposal's time on the worker that it waits, 0 to 1."""
        queue = self.queue(drafted=True)
        return queue / (1 + queue)


class TargetTimes:
    """What its answers take beside passes, at one level of load. queues: of proposals, or of plain tokens."""

    def __init__(self) -> None:
        self.round_trip = Recent()
        self.queues = {True: Ratio(0.85, weight=0.1), False: Ratio(0.85, weight=0.1)}

    def last_for(self, sessions: int) -> None:
        self.round_trip.last_for(sessions)
        for queue in self.queues.values():
            queue.decay = 0.85 ** (1 / sessions)


V = TypeVar("V")


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

    def forget(self) -> None:
        """Begin anew: the forecasts have changed."""
        self._sums.clear()


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
