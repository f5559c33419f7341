"""Two workers and the wires between them, as numbers: what rounds take and bring, event by event.

Nothing here comes from `coordinator.control`'s forecasts, so that these can be compared with it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.control import Answer, Choice, RoundSeen
from splitspec.types import Mode


@dataclass
class World:
    """One session's rounds. Times in ms; round_trip: of both legs together, half of it on each.

    noise: relative, of passes and drafts. stall: chance that a round's pass takes ten times as long.
    """

    acceptance: float = 0.8
    round_trip: float = 5.0
    pass_ms: float = 25.0
    position_ms: float = 0.3
    token_ms: float = 3.0
    branch_ms: float = 3.0
    hit_rate: float = 0.8
    noise: float = 0.0
    stall: float = 0.0
    seed: int = 0
    now: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._streaming = False  # plain tokens are granted ahead
        self._ahead = False  # a child of the last proposal is on its way, and its parent was accepted whole
        self._prepared = Mode.PLAIN  # what the draft worker did during the last round, if that was to prepare

    def play(self, choice: Choice, queue: Callable[[int], float] = lambda positions: 0.0) -> RoundSeen:
        """One round. queue: ms that a pass over so many positions waits."""
        k, mode = choice.num_draft_tokens, choice.mode
        accepted = self._accepted(k)
        positions = k if mode is Mode.PIPELINED else k + 1
        busy = (self.pass_ms + self.position_ms * positions) * self._jitter()
        busy *= 10 if self._random.random() < self.stall else 1
        verify = busy + queue(positions)
        if mode is Mode.PLAIN:
            duration = verify if self._streaming else verify + self.round_trip / 2
            seen = self._seen(0, 0, 1, duration, busy, verify, waited=not self._streaming)
            self._streaming, self._ahead, self._prepared = True, False, Mode.PLAIN
            return seen
        draft = k * self.token_ms * self._jitter()
        hit = self._random.random() < self.hit_rate if self._prepared is not Mode.PLAIN else None
        fresh = draft + self.round_trip + verify
        waited = True
        if mode is Mode.PIPELINED and self._ahead:
            # As many proposals are on their way as were allowed: the slowest stage sets the pace.
            duration = max(draft, verify, fresh / (choice.num_ahead + 1))
            waited = False
        elif hit and self._prepared is Mode.PREFETCH_PULL:
            draft = (k + 1) * self.branch_ms
            duration = max(self.round_trip + verify, draft)
        elif hit and self._prepared is Mode.PREFETCH_PUSH:
            draft = (k + 1) * self.branch_ms
            duration = max(verify, self.round_trip + draft)
        else:
            duration = fresh
        self._streaming = False
        self._prepared = mode if mode in (Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH) else Mode.PLAIN
        self._ahead = mode is Mode.PIPELINED and accepted == k
        tokens = accepted if self._ahead else accepted + 1  # the bonus is held
        return self._seen(k, accepted, tokens, duration, busy, verify, waited, draft, hit)

    def _accepted(self, k: int) -> int:
        accepted = 0
        while accepted < k and self._random.random() < self.acceptance:
            accepted += 1
        return accepted

    def _jitter(self) -> float:
        return max(0.3, self._random.gauss(1, self.noise))

    def _seen(
        self,
        k: int,
        accepted: int,
        tokens: int,
        duration: float,
        busy: float,
        verify: float,
        waited: bool,
        draft: float = 0.0,
        hit: bool | None = None,
    ) -> RoundSeen:
        self.now += duration
        self.tokens += tokens
        leg = self.round_trip / 2
        target = Answer(verify - busy, busy, verify, verify + leg if waited else None)
        proposal = Answer(0.0, draft, draft, draft + leg if waited and not hit else None) if k else None
        return RoundSeen(k, k, accepted, tokens, duration, target, proposal, hit)


@dataclass
class Crowd:
    """Sessions on one target that joins whatever waits into its next pass; plain and sequential rounds.

    choose, observe: of a session, by number. Each has its own draft accelerator.
    """

    world: World
    choose: Callable[[int], Choice]
    observe: Callable[[int, RoundSeen], None]
    now: float = 0.0
    tokens: int = 0
    _events: list[tuple[float, int]] = field(default_factory=list)
    _waiting: dict[int, tuple[float, float, Choice]] = field(default_factory=dict)
    _started: dict[int, float] = field(default_factory=dict)

    def join(self, session: int) -> None:
        self._started[session] = self.now
        self._ask(session)

    def run(self, until: float) -> None:
        """Pass after pass, to this time."""
        while self.now < until:
            if not self._waiting:
                self.now = max(self.now, self._events[0][0])
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)
            ready = {s: job for s, job in self._waiting.items() if job[0] <= self.now}
            if not ready:
                self.now = min(job[0] for job in self._waiting.values())
                continue
            self._pass(ready)

    def _ask(self, session: int) -> None:
        """The session's next job: at the target once it is drafted and sent."""
        choice, world = self.choose(session), self.world
        draft = choice.num_draft_tokens * world.token_ms
        arrival = self.now + draft + (world.round_trip if choice.num_draft_tokens else 0.0)
        heapq.heappush(self._events, (arrival, session))
        self._waiting[session] = (arrival, draft, choice)

    def _pass(self, ready: dict[int, tuple[float, float, Choice]]) -> None:
        world, started = self.world, self.now
        positions = sum(choice.num_draft_tokens + 1 for _, _, choice in ready.values())
        busy = world.pass_ms + world.position_ms * positions
        self.now += busy
        for session, (arrival, draft, choice) in ready.items():
            k = choice.num_draft_tokens
            accepted = world._accepted(k)
            self.tokens += accepted + 1
            total, leg = self.now - arrival, world.round_trip / 2
            target = Answer(started - arrival, busy, total, total + leg if k else None, positions)
            proposal = Answer(0.0, draft, draft, draft + leg) if k else None
            duration = self.now - self._started[session]
            self._started[session] = self.now
            del self._waiting[session]
            self.observe(session, RoundSeen(k, k, accepted, accepted + 1, duration, target, proposal))
            self._ask(session)
