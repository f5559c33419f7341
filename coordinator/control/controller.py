"""The control of one request: mode and proposal length, anew for each round (docs/overlap.md, "Control")."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import itemgetter

from coordinator.control.forecast import Arm, Forecast, Inputs
from coordinator.control.seen import RoundSeen
from coordinator.control.shared import Draft, Drafter, Outcomes, Shared
from coordinator.control.trying import Trying
from splitspec.telemetry import names
from splitspec.telemetry.names import Attribute
from splitspec.telemetry.tracing import Value
from splitspec.types import MAX_NUM_DRAFT_TOKENS, Mode

#: The current choice is kept unless another is predicted to be this much better.
_HYSTERESIS = 1.05
#: ms per draft token before any was seen, over those of a plain token.
_FIRST_DRAFT = 0.125
#: Draft tokens of a proposal that is neither short nor long.
_USUAL = 4
#: Share of a round by which the round trip must have changed for the modes' skew to be forgotten.
_NEWS = 0.2

_PLAIN = Arm(Mode.PLAIN, 0)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a round does. tried: not the best that is known, but to learn.

    num_ahead: plain tokens to keep granted, or for `Propose.num_ahead`. predicted: tokens/s; it and `inputs`
    are None before the target's first pass.
    """

    mode: Mode
    num_draft_tokens: int
    num_ahead: int
    tried: bool = False
    predicted: float | None = None
    inputs: Inputs | None = None

    def attributes(self) -> dict[Attribute, Value]:
        """The decision and what it rests on, for the round's span."""
        decision: dict[Attribute, Value] = {
            names.MODE: self.mode.name.lower(),
            names.CONTROL_NUM_DRAFT_TOKENS: self.num_draft_tokens,
            names.CONTROL_NUM_AHEAD: self.num_ahead,
            names.CONTROL_TRIED: self.tried,
        }
        inputs, k = self.inputs, self.num_draft_tokens
        if inputs is None or self.predicted is None:
            return decision
        return {
            **decision,
            names.CONTROL_PREDICTED: self.predicted,
            names.CONTROL_ACCEPTANCE: inputs.acceptance[: max(k, 1)],
            names.CONTROL_PASS_MS: inputs.verify(k + 1) if k else inputs.plain_ms,
            names.CONTROL_DRAFT_MS: inputs.draft(k) if k else 0.0,
            names.CONTROL_ROUND_TRIP_MS: inputs.round_trip_ms,
            names.CONTROL_HIT_RATE: inputs.hit_rate,
            names.CONTROL_LOAD: inputs.load,
            names.CONTROL_SESSIONS: inputs.sessions,
        }


class Controller:
    """Chooses for one request. `choose` before each round, `observe` behind it; `close` at the end.

    modes: those that its drafter and rule allow; plain always is. mode, num_draft_tokens: pinned by the
    request. The very first round on a target worker is plain in any case. branches: verdicts that a
    prefetching draft worker prepares for. Nothing in it is random.
    """

    def __init__(
        self,
        shared: Shared,
        target: str,
        modes: Collection[Mode] = tuple(Mode),
        *,
        mode: Mode | None = None,
        num_draft_tokens: int | None = None,
        branches: int = 8,
    ) -> None:
        """target: the worker's id. The draft worker comes with `use_draft`; until then all is plain."""
        self._shared = shared
        self._target = shared.target(target)
        self._target.join(self)
        self._modes = [mode] if mode is not None else [each for each in Mode if each in {*modes, Mode.PLAIN}]
        self._pinned = num_draft_tokens
        self._branches = branches
        self._drafting = False
        #: The highest level of load since it last fell.
        self._level = 0
        self._trying = Trying()
        self._take(Draft(Drafter()))
        self._outcomes = Outcomes(self._draft.drafter)
        #: The best length of each mode, the last time.
        self._lengths: dict[Mode, int] = {}
        self._arm = _PLAIN
        self._choice: Choice | None = None
        #: To ask for a proposal of one token, since nobody has for long.
        self._checking = False

    def use_target(self, worker_id: str) -> None:
        """Go on with another target worker."""
        self._target.leave(self)
        self._target = self._shared.target(worker_id)
        self._target.join(self)
        self._trying.forgive()

    def use_draft(self, worker_id: str, drafter: str) -> None:
        """Go on with this draft worker. drafter: name and weights; another's acceptance is learned anew."""
        draft = self._shared.draft(worker_id, drafter)
        if self._draft.drafter is not draft.drafter:
            self._outcomes = Outcomes(draft.drafter)
        self._take(draft)
        self._trying.forgive()
        self._drafting = True

    def close(self) -> None:
        """The request's last round is over."""
        self._target.leave(self)

    def _take(self, draft: Draft) -> None:
        self._draft = draft
        self._times = draft.times.at(self._target.level)

    def choose(self, limit: int) -> Choice:
        """What the next round does. limit: longest proposal that it may ask for, 0 for none."""
        if not self._target.busy.known:
            return Choice(Mode.PLAIN, 0, 1)
        limit = min(limit, MAX_NUM_DRAFT_TOKENS) if self._drafting else 0
        self._meet()
        forecast = Forecast.of(self._inputs())
        arms = self._arms(forecast, limit)
        self._arm = best = self._settled(forecast, arms, limit)
        tried = None
        if best == _PLAIN and limit and (self._checking or self._times.check()):
            self._checking = True
            tried = next((Arm(mode, 1) for mode, _ in self._options(forecast, best, arms, limit)), None)
        elif self._trying.due(best):
            tried = self._trying.choose(forecast, best, self._options(forecast, best, arms, limit))
        arm = tried or best
        ahead, rate = forecast.num_ahead(arm, self._branches), self._rate(forecast, arm)
        self._choice = Choice(arm.mode, arm.num_draft_tokens, ahead, tried is not None, rate, forecast.inputs)
        return self._choice

    def observe(self, seen: RoundSeen) -> None:
        """Learn from a round that is over."""
        usual = self._target.saw(seen.num_draft_tokens, seen.target)
        self._outcomes.saw(seen)
        usual = self._times.saw(seen) and usual
        self._checking = self._checking and not seen.num_asked
        choice = self._choice
        if choice is not None and choice.predicted is not None and seen.num_draft_tokens and usual:
            unskewed = choice.predicted * self._times.skew[choice.mode]
            self._times.skew.saw(choice.mode, seen.duration_ms, 1000 * seen.num_tokens / unskewed)
        if choice is not None and choice.inputs is not None:
            news_ms = abs(sum(self._round_trips_ms()) - choice.inputs.round_trip_ms)
            # What rounds took beyond their forecasts has its reason then.
            if news_ms > _NEWS * seen.duration_ms:
                self._times.skew.forget()
        self._trying.observe(seen, self._target.plain_ms)

    def _meet(self) -> None:
        """The first session that drafts with this worker at this level of load may spend something to find
        out."""
        level = self._target.level
        self._times = self._draft.times.at(level)
        if level < self._level - 1:
            self._trying.forgive()
            self._level = level
        self._level = max(self._level, level)
        if self._drafting and not self._times.met:
            self._times.met = True
            self._trying.begin(self._target.plain_ms)

    def _rate(self, forecast: Forecast, arm: Arm) -> float:
        """Tokens/s, less what such rounds were slower than their forecasts."""
        return forecast.rate(arm) / self._times.skew[arm.mode]

    def _arms(self, forecast: Forecast, limit: int) -> list[Arm]:
        """Each mode that may be used, at its best length."""
        drafted = [mode for mode in self._modes if mode is not Mode.PLAIN]
        if not limit or self._pinned == 0 or not drafted:
            return [_PLAIN]
        if self._pinned is not None:
            return [Arm(mode, min(self._pinned, limit)) for mode in drafted]
        arms = [forecast.best(mode, limit, self._lengths.get(mode, 1)) for mode in self._modes]
        self._lengths = dict(arms)
        return arms

    def _settled(self, forecast: Forecast, arms: list[Arm], limit: int) -> Arm:
        """The best arm, or the current one when it is nearly as good."""
        best_rate, best = max([(self._rate(forecast, arm), arm) for arm in arms], key=itemgetter(0))
        mode, k = self._arm
        if best != _PLAIN and _PLAIN in arms and not self._trying.affordable(plain=mode is Mode.PLAIN):
            return _PLAIN
        if best == self._arm or all(arm.mode is not mode for arm in arms):
            return best
        current = Arm(mode, min(self._pinned or k, limit)) if mode is not Mode.PLAIN else _PLAIN
        return best if best_rate > _HYSTERESIS * self._rate(forecast, current) else current

    def _options(self, forecast: Forecast, best: Arm, arms: list[Arm], limit: int) -> list[Arm]:
        """What may be tried beside the best arm.

        Plain: one proposal. Else a token more or less, a plain round (what it takes sets the bar), and
        preparing, as only then its hits are counted.
        """
        if best == _PLAIN:
            drafted = [arm for arm in arms if arm.mode is not Mode.PLAIN]
            alone = [arm for arm in drafted if arm.mode is Mode.SEQUENTIAL]
            return alone or drafted[:1]
        mode, k = best
        options = [Arm(mode, k + 1), *arms, Arm(mode, k - 1)] if self._pinned is None else arms
        wanted = (mode, Mode.PLAIN, Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH)
        shortest = {Mode.PLAIN: 0}
        return [
            arm
            for arm in options
            if arm != best
            and arm.mode in wanted
            and shortest.get(arm.mode, 1) <= arm.num_draft_tokens <= limit
        ]

    def _inputs(self) -> Inputs:
        target, draft = self._target, self._times
        sessions, queue = target.sessions, 1 + target.queue(drafted=True)
        plain_ms = (1 + target.queue(drafted=False)) * max(target.busy(sessions), 1e-3)
        target_trip_ms, draft_trip_ms = self._round_trips_ms()
        token_ms = _FIRST_DRAFT * plain_ms
        if draft.proposal.known:
            token_ms = draft.proposal.slope
        first, *others = self._outcomes.acceptance.values
        return Inputs(
            acceptance=[first * draft.in_time.value(1.0), *others],
            plain_ms=plain_ms,
            pass_ms=queue * target.busy.intercept,
            position_ms=queue * target.busy.slope,
            proposal_ms=draft.proposal.intercept,
            token_ms=token_ms,
            branch_ms=max(draft.branch.value(token_ms), self._branches_of_all_ms()),
            round_trip_ms=target_trip_ms + draft_trip_ms,
            target_round_trip_ms=target_trip_ms,
            hit_rate=self._outcomes.hit_rate,
            load=target.load,
            sessions=sessions,
        )

    def _branches_of_all_ms(self) -> float:
        """A draft step when all sessions prepare branches: what a few measure while the others don't is less.

        A token takes longer here than for a session alone because the others draft, too: branches are as many
        times more of them.
        """
        here, alone = self._times.proposal, self._draft.times.at(1).proposal
        if here is alone or not (here.known and alone.known):
            return 0.0
        token_ms, longer_ms = here(_USUAL) / _USUAL, (here(_USUAL) - alone(_USUAL)) / _USUAL
        return token_ms + (self._branches - 1) * max(0.0, longer_ms)

    def _round_trips_ms(self) -> tuple[float, float]:
        """Of the legs to target and draft worker."""
        target_ms = self._target.round_trip.value(0.0)
        return target_ms, self._times.round_trip.value(target_ms)
