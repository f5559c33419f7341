"""Predicted tokens/s of a mode at a proposal length: the closed forms of docs/overlap.md.

The forms assume one acceptance for all tokens; here it goes by depth, so that E(K), the tokens of a round,
is the sum of the chances that its draft tokens are reached and accepted, plus one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from splitspec.types import Mode

#: Most proposals that a pipelined draft worker is ahead, and plain tokens that are granted ahead.
MOST_AHEAD = 8
MOST_GRANTED = 16


class Arm(NamedTuple):
    """A mode with its proposal length, 0 for plain."""

    mode: Mode
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a forecast builds on. Times in ms.

    acceptance: by depth, from the first draft token on. plain_ms: per plain token. pass_ms, position_ms: a
    pass over n positions takes pass_ms + n * position_ms, its queue included. proposal_ms, token_ms:
    a proposal of K tokens takes proposal_ms + K * token_ms. branch_ms: a draft step over all branches that
    are prepared. round_trip_ms: both legs; target_round_trip_ms: the target's. hit_rate: of preparing.
    load: share of its time on the target that a proposal waits. sessions: on the target.
    """

    acceptance: Sequence[float]
    plain_ms: float
    pass_ms: float
    position_ms: float
    proposal_ms: float
    token_ms: float
    branch_ms: float
    round_trip_ms: float
    target_round_trip_ms: float
    hit_rate: float
    load: float = 0.0
    sessions: float = 1.0

    def draft(self, k: int) -> float:
        return self.proposal_ms + k * self.token_ms

    def verify(self, positions: int, away_ms: float = 0.0) -> float:
        """A verification when all sessions do the same: each brings its positions to a pass, and is away from
        the target for away_ms between two. So a position is priced for all that wait for it (2406.14066).

        v = alone + shared * v / (v + away): another session is in the pass for the share of its time that it
        isn't away.
        """
        alone = self.pass_ms + positions * self.position_ms
        if self.sessions == 1:
            return alone
        shared = (self.sessions - 1) * positions * self.position_ms
        half = (alone + shared - away_ms) / 2
        return half + math.sqrt(half * half + alone * away_ms)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted tokens/s from one set of inputs. reached[i]: P(the first i draft tokens are accepted)."""

    inputs: Inputs
    reached: tuple[float, ...]
    tokens: tuple[float, ...]

    @classmethod
    def of(cls, inputs: Inputs) -> Forecast:
        reached = tuple(accumulate(inputs.acceptance, mul, initial=1.0))
        return cls(inputs, reached, tuple(accumulate(reached)))

    def rate(self, arm: Arm) -> float:
        """Tokens/s of an arm."""
        return 1000 / _MS_PER_TOKEN[arm.mode](self, arm.num_draft_tokens)

    def best(self, mode: Mode, limit: int, start: int = 1) -> Arm:
        """The mode at its best length, 1 to `limit`, climbed to from `start`: rates have one top over K."""
        if mode is Mode.PLAIN:
            return Arm(mode, 0)
        ms_per_token = _MS_PER_TOKEN[mode]
        k = max(1, min(start, limit))
        least = ms_per_token(self, k)
        for step in (1, -1):
            while 1 <= k + step <= limit and (ms := ms_per_token(self, k + step)) < least:
                k, least = k + step, ms
        return Arm(mode, k)

    def num_ahead(self, arm: Arm, branches: int) -> int:
        """Plain: tokens to keep granted. Pipelined: proposals ahead. Prefetch: verdicts to prepare for."""
        inputs, k = self.inputs, arm.num_draft_tokens
        if arm.mode is Mode.PLAIN:
            return min(1 + math.ceil(inputs.target_round_trip_ms / inputs.plain_ms), MOST_GRANTED)
        if arm.mode is Mode.PIPELINED:
            latency = inputs.round_trip_ms + inputs.verify(k)
            return max(1, min(math.ceil(latency / max(inputs.draft(k), 1e-3)), MOST_AHEAD))
        return branches if arm.mode in (Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH) else 0

    def _plain(self, _: int) -> float:
        """Granted ahead, so that the round trip is hidden."""
        inputs = self.inputs
        return max(inputs.plain_ms, (inputs.target_round_trip_ms + inputs.plain_ms) / MOST_GRANTED)

    def _sequential(self, k: int) -> float:
        return self._fresh(k) / self.tokens[k]

    def _fresh(self, k: int) -> float:
        """A round whose proposal is drafted when it's asked for."""
        inputs = self.inputs
        away_ms = inputs.proposal_ms + k * inputs.token_ms + inputs.round_trip_ms
        return away_ms + inputs.verify(k + 1, away_ms)

    def _pipelined(self, k: int) -> float:
        """A chain of proposals up to the first failure: the latency of one, then the slowest of its stages
        for each that is accepted whole (2408.11850). Its tokens are those accepted and a correction."""
        inputs, whole = self.inputs, self.reached[k]
        draft, verify = inputs.draft(k), inputs.verify(k)
        first = draft + inputs.round_trip_ms + verify
        stage = max(draft, verify, first / (MOST_AHEAD + 1))
        tokens = (self.tokens[k] - whole) / (1 - whole)
        return (first + stage * whole / (1 - whole)) / tokens

    def _pull(self, k: int) -> float:
        """On a hit the answer is there when the verdict is (2603.03251)."""
        inputs = self.inputs
        prepared = (k + 1) * inputs.branch_ms
        return self._prefetch(k, max(inputs.round_trip_ms + inputs.verify(k + 1), prepared))

    def _push(self, k: int) -> float:
        """On a hit the target has the proposal when its verdict is drawn."""
        inputs = self.inputs
        prepared = (k + 1) * inputs.branch_ms
        return self._prefetch(k, max(inputs.verify(k + 1), inputs.round_trip_ms + prepared))

    def _prefetch(self, k: int, hit_ms: float) -> float:
        hit_rate = self.inputs.hit_rate
        return (hit_rate * hit_ms + (1 - hit_rate) * self._fresh(k)) / self.tokens[k]


_MS_PER_TOKEN: Mapping[Mode, Callable[[Forecast, int], float]] = {
    Mode.PLAIN: Forecast._plain,
    Mode.SEQUENTIAL: Forecast._sequential,
    Mode.PIPELINED: Forecast._pipelined,
    Mode.PREFETCH_PULL: Forecast._pull,
    Mode.PREFETCH_PUSH: Forecast._push,
}
