"""Rounds that try something else than the best that is known: on a fixed schedule, within a budget."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.control.forecast import Arm, Forecast
from coordinator.control.seen import RoundSeen

#: Rounds between two tries; fewer while a plain session knows little of its draft.
_PERIOD = 32
_FIRST_PERIOD = 2
#: Share of the time that tries may cost.
_SHARE = 0.01


class Trying:
    """The account of one request's tries. One costs what the best arm would have made of its time."""

    def __init__(self) -> None:
        self._budget_ms = 0.0
        self._charged_ms = 0.0
        self._best_ms = 0.0
        self._rounds = 0
        self._turn = 0
        #: The try that is chosen and not yet made.
        self._arm: Arm | None = None

    def grant(self, budget_ms: float) -> None:
        """So much may be spent at once: for a draft that nobody knows."""
        self._budget_ms += budget_ms

    def due(self, *, hurried: bool) -> bool:
        """Whether the next round should be a try."""
        return self._rounds >= (_FIRST_PERIOD if hurried else _PERIOD)

    def choose(self, forecast: Forecast, best: Arm, options: Sequence[Arm]) -> Arm | None:
        """The option whose turn it is, if it can be paid."""
        if self._arm is not None and options:  # it waits until what was granted before it has come
            return self._arm
        self._arm = None
        if not options:
            return None
        self._best_ms = 1000 / forecast.rate(best)
        arm = options[self._turn % len(options)]
        tokens = forecast.tokens[arm.num_draft_tokens]
        cost_ms = max(0.0, tokens * (1000 / forecast.rate(arm) - self._best_ms))
        if cost_ms > self._budget_ms:
            self._turn += 1
            return None
        self._budget_ms -= cost_ms
        self._charged_ms = cost_ms
        self._arm = arm
        return arm

    def observe(self, seen: RoundSeen) -> None:
        """Earn with every round; pay what a try has cost beyond what was expected."""
        self._budget_ms += _SHARE * seen.duration_ms
        self._rounds += 1
        if self._arm is not None and bool(seen.num_asked) == bool(self._arm.num_draft_tokens):
            cost_ms = seen.duration_ms - seen.num_tokens * self._best_ms
            self._budget_ms -= max(0.0, cost_ms - self._charged_ms)
            self._arm = None
            self._turn += 1
            self._rounds = 0
