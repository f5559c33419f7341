"""Rounds that try something else than the best that is known: on a fixed schedule, and within an account."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.control.forecast import Arm, Forecast
from coordinator.control.seen import RoundSeen
from splitspec.types import Mode

#: Rounds between two tries. A plain session learns of its draft by tries alone: there the account rules.
_PERIOD = 16
_PLAIN_PERIOD = 4
#: What tries may cost: a share of the time, and at once so many plain tokens for a draft that nobody knows.
_SHARE = 0.01
_UNKNOWN_TOKENS = 6.0
#: What can be saved up for later tries, in plain tokens.
_MOST_TOKENS = 8.0
#: Debts, in plain tokens, beyond which plain decoding isn't left, and is gone back to whatever is predicted.
_LEAVING_TOKENS = 8.0
_RETURNING_TOKENS = 16.0
#: What a round leaves of debts.
_DEBT_DECAY = 0.998
#: What one round can lose, in plain tokens: a stall of the machine isn't the draft's fault.
_MOST_LOST_TOKENS = 8.0


class Trying:
    """Keeps one request's account: what its drafted rounds have won and lost against plain decoding, in ms.

    A try must be covered by it. So a draft that is no good costs little more than the share.
    """

    def __init__(self) -> None:
        self._account_ms = self._plain_ms = 0.0
        self._rounds = 0
        self._turn = 0
        #: The try that was chosen for the next round.
        self._arm: Arm | None = None

    def begin(self, plain_ms: float) -> None:
        """With a draft that nobody knows."""
        self._account_ms += _UNKNOWN_TOKENS * plain_ms

    def forgive(self) -> None:
        """What was lost under other conditions counts no more."""
        self._account_ms = max(self._account_ms, 0.0)

    def affordable(self, *, plain: bool) -> bool:
        """Whether drafting may go on, or begin when the session is plain now."""
        return self._account_ms >= -(_LEAVING_TOKENS if plain else _RETURNING_TOKENS) * self._plain_ms

    def due(self, best: Arm) -> bool:
        """Whether the next round should be a try."""
        return self._rounds >= (_PLAIN_PERIOD if best.mode is Mode.PLAIN else _PERIOD)

    def choose(self, forecast: Forecast, best: Arm, options: Sequence[Arm]) -> Arm | None:
        """The option whose turn it is, if the account covers it.

        It is chosen again until the round is made: tokens that were granted ahead may have to come first.
        """
        self._arm = None
        if not options:
            return None
        arm = options[self._turn % len(options)]
        cost_ms = (
            1000 * forecast.tokens[arm.num_draft_tokens] * (1 / forecast.rate(arm) - 1 / forecast.rate(best))
        )
        if cost_ms > self._account_ms:
            self._turn += 1
            return None
        self._arm = arm
        return arm

    def observe(self, seen: RoundSeen, plain_ms: float) -> None:
        """Enter a round. plain_ms: what a token takes by plain decoding."""
        self._plain_ms = plain_ms
        won_ms = seen.num_tokens * plain_ms - seen.duration_ms if seen.num_asked else 0.0
        won_ms = max(won_ms, -_MOST_LOST_TOKENS * plain_ms)
        kept_ms = self._account_ms * (_DEBT_DECAY if self._account_ms < 0 else 1)
        account_ms = kept_ms + won_ms + _SHARE * seen.duration_ms
        self._account_ms = min(account_ms, _MOST_TOKENS * plain_ms)
        self._rounds += 1
        if self._arm is not None and bool(seen.num_asked) == bool(self._arm.num_draft_tokens):
            self._arm = None
            self._turn += 1
            self._rounds = 0
