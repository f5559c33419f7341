"""What the control knows of workers and drafters, across requests: times by level of load.

A session has its own acceptance and hit rate, which start from its drafter's.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from coordinator.control.estimates import Acceptance, Line, Ratio, Recent, Skew
from coordinator.control.seen import Answer, RoundSeen

#: A guess for a drafter that was never seen, hopeful as that of its acceptance.
_FIRST_HIT_RATE = 0.9
#: What a plain round leaves of what is known about the draft, to a session and to all of them.
_FADING = 0.9
_DRAFTER_FADING = 0.9995
_SKEW_FADING = 0.99
#: Of what is known of proposals coming in time, per proposal.
_IN_TIME_DECAY = 0.7
#: Plain rounds after which a draft's times say nothing about now, and what a session gets to measure them.
_STALE_ROUNDS = 512
_CHECK_ROUNDS = 32
#: Workers and drafters that are kept, the last used ones.
_MOST_KEPT = 256


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
        if not seen.num_asked:
            self._fade()
        elif seen.draft is not None:  # one that came too late says nothing about its tokens
            self.acceptance.add(seen.num_asked, seen.num_accepted)
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

    @property
    def hit_rate(self) -> float:
        return self.hits.value(_FIRST_HIT_RATE)


class Draft:
    """What is known of one drafter on one draft worker."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.times = ByLoad(DraftTimes)


class DraftTimes:
    """What rounds with one drafter on one draft worker take at one level of load.

    They are measured by drafting alone: what was bad when drafting ended would stay so for good, were it not
    measured again from time to time, whatever that is expected to cost.
    """

    def __init__(self) -> None:
        #: A session has begun to find out.
        self.met = False
        #: ms of a proposal, queue included, over its draft tokens.
        self.proposal = _proposal_line()
        #: ms per draft token of a proposal that was prepared, all its branches together.
        self.branch = Recent()
        self.round_trip = Recent()
        #: How often a proposal comes within the patience.
        self.in_time = Ratio(_IN_TIME_DECAY, weight=1.0)
        self.skew = Skew()
        # Plain rounds since the last proposal, and how many there may be.
        self._unused, self._due = 0, _STALE_ROUNDS

    def last_for(self, sessions: int) -> None:
        self.branch.last_for(sessions)
        self.round_trip.last_for(sessions)
        self.in_time.decay = _IN_TIME_DECAY ** (1 / sessions)
        self.skew.last_for(sessions)

    def check(self) -> bool:
        """Whether the session that asks should measure; if it fails to, another one is told so."""
        due = self._unused >= self._due
        if due:
            self._due += _CHECK_ROUNDS
        return due

    def saw(self, seen: RoundSeen) -> bool:
        """A round. Returns whether its proposal took about as long as was to be expected."""
        if not seen.num_asked:
            self._fade()
            return True
        stale = self._unused >= _STALE_ROUNDS
        # One that comes in time after so long counts more than all that came too late before.
        self.in_time.add(seen.draft is not None, decay=0.0 if stale and seen.draft is not None else None)
        if seen.draft is not None:
            self.round_trip.add(seen.draft.round_trip_ms)
        if seen.draft is None or not seen.num_draft_tokens:
            self._due = self._unused + _STALE_ROUNDS
            return True
        self._unused, self._due = 0, _STALE_ROUNDS
        busy_ms = seen.draft.queue_ms + seen.draft.busy_ms
        self.branch.add(busy_ms / (seen.num_draft_tokens + 1) if seen.hit else None)
        if seen.hit:
            return True
        if stale:
            self.proposal = _proposal_line()
        return self.proposal.add(seen.num_draft_tokens, busy_ms)

    def _fade(self) -> None:
        """A plain round: what isn't measured any more counts less beside what will be."""
        self._unused += 1
        self.round_trip.add(None)
        self.branch.add(None)
        self.skew.fade(_SKEW_FADING)


def _proposal_line() -> Line:
    """Nearly all of a proposal's time is per token."""
    return Line(slope_per_intercept=20.0)


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

    def saw(self, num_draft_tokens: int, answer: Answer) -> bool:
        """A verdict. Returns whether its pass took about as long as was to be expected."""
        own = num_draft_tokens + 1
        positions = answer.positions or own
        self._positions += 0.05 * (positions - self._positions)
        self._own += 0.05 * (own - self._own)
        self._company.add(positions / own)
        usual = self.busy.add(positions, answer.busy_ms)
        times = self._times.at(self.level)
        times.round_trip.add(answer.round_trip_ms)
        if answer.busy_ms > 0:  # no more than a few passes: the rest is a stall
            times.queues[num_draft_tokens > 0].add(min(answer.queue_ms / answer.busy_ms, 4.0))
        return usual

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
