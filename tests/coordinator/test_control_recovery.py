"""What one bad event leaves in the control's memory: soon it chooses again as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest

from coordinator.control import Answer, Choice, Controller, RoundSeen, Shared
from coordinator.control.shared import DraftTimes
from splitspec.types import MAX_NUM_DRAFT_TOKENS, Mode
from tests.coordinator.control_world import World
from tests.coordinator.test_control import share_of_best

#: What the coordinator sees of a round in place of what it was: from the choice and the round.
Seeing = Callable[[Choice, RoundSeen], RoundSeen]


class Service:
    """Sessions whose requests follow one another, on workers of their own speed but one memory."""

    def __init__(self, world: World, sessions: int, length: int) -> None:
        """length: rounds of a request."""
        self._length = length
        self._workers = {"target": "target", "draft": "draft"}
        self.shared = Shared()
        self.worlds: list[World] = []
        self._controls: list[Controller] = []
        self._rounds: list[int] = []
        for seed in range(sessions):
            self.join(replace(world, seed=100 * world.seed + seed))

    def join(self, world: World) -> None:
        self.worlds.append(world)
        self._rounds.append(0)
        self._controls.append(self._control())

    def leave(self, remaining: int) -> None:
        for control in self._controls[remaining:]:
            control.close()
        del self.worlds[remaining:], self._controls[remaining:], self._rounds[remaining:]

    def another(self, role: str) -> None:
        """Another worker takes the place of the one with this role."""
        self._workers[role] += "'"
        for control in self._controls:
            if role == "target":
                control.use_target(self._workers[role])
            else:
                control.use_draft(self._workers[role], "drafter")

    def run(self, rounds: int, seeing: Seeing = lambda choice, seen: seen) -> list[Choice]:
        """Rounds of each session."""
        made = []
        for _ in range(rounds):
            choices = [self._choose(i) for i in range(len(self.worlds))]
            for control, choice, world in zip(self._controls, choices, self.worlds, strict=True):
                control.observe(seeing(choice, world.play(choice)))
            made += choices
        return made

    def change(self, **values: float) -> None:
        for world in self.worlds:
            for name, value in values.items():
                setattr(world, name, value)

    def share(self, rounds: int) -> float:
        return share_of_best(self.worlds[0], self.run(rounds))

    def _choose(self, session: int) -> Choice:
        if self._rounds[session] == self._length:
            self._controls[session].close()
            self._controls[session], self._rounds[session] = self._control(), 0
        self._rounds[session] += 1
        return self._controls[session].choose(MAX_NUM_DRAFT_TOKENS)

    def _control(self) -> Controller:
        control = Controller(self.shared, self._workers["target"])
        control.use_draft(self._workers["draft"], "drafter")
        return control


def plain(choice: Choice, seen: RoundSeen) -> RoundSeen:
    """No draft worker is there."""
    return RoundSeen(0, 0, 0, 1, 25.3, Answer(0.0, 25.3, 25.3))


def late(choice: Choice, seen: RoundSeen) -> RoundSeen:
    """No proposal comes within the patience."""
    k = choice.num_draft_tokens
    wait_ms = 25.3 * (k + 1) if k else 0.0
    return RoundSeen(k, 0, 0, 1, 25.3 + wait_ms, Answer(0.0, 25.3, 25.3))


def stopped(choice: Choice, seen: RoundSeen) -> RoundSeen:
    """The coordinator stands still for 3 s."""
    if choice.num_draft_tokens:
        return replace(late(choice, seen), duration_ms=3025.3)
    wait_ms = seen.target.wait_ms and seen.target.wait_ms + 3000
    return replace(seen, duration_ms=seen.duration_ms + 3000, target=replace(seen.target, wait_ms=wait_ms))


def slower(target: float = 1, draft: float = 1, hidden: float = 1) -> Seeing:
    """The worker takes so many times as long, or the round does for a reason that no worker sees."""

    def slow(answer: Answer, times: float) -> tuple[Answer, float]:
        more_ms = answer.busy_ms * (times - 1)
        wait_ms = answer.wait_ms and answer.wait_ms + more_ms
        longer = Answer(answer.queue_ms, answer.busy_ms + more_ms, answer.total_ms + more_ms, wait_ms)
        return longer, more_ms

    def see(choice: Choice, seen: RoundSeen) -> RoundSeen:
        verdict, more_ms = slow(seen.target, target)
        duration_ms = seen.duration_ms * (hidden if seen.num_draft_tokens else 1) + more_ms
        if seen.draft is None:
            return replace(seen, target=verdict, duration_ms=duration_ms)
        proposal, more_ms = slow(seen.draft, draft)
        return replace(seen, target=verdict, draft=proposal, duration_ms=duration_ms + more_ms)

    return see


def draft_worker_restarts(service: Service) -> None:
    service.run(150, plain)
    service.another("draft")


def draft_worker_restarts_cold(service: Service) -> None:
    draft_worker_restarts(service)
    service.run(2, slower(draft=8))


def draft_worker_hangs(service: Service) -> None:
    for pause in (1, 3, 7, 15, 31):
        service.run(1, late)
        service.run(pause, plain)


def target_worker_restarts_cold(service: Service) -> None:
    service.another("target")
    service.run(1, slower(target=20))
    service.run(1, slower(target=4))


def coordinator_stops(service: Service) -> None:
    service.run(1, stopped)


def machine_stalls(service: Service) -> None:
    service.run(1, slower(target=200))


def everything_is_slow(service: Service) -> None:
    service.run(50, slower(target=4, draft=4))


def drafts_are_slow(service: Service) -> None:
    service.change(token_ms=60.0, branch_ms=60.0)
    service.run(100)
    service.change(token_ms=3.0, branch_ms=3.0)


def the_way_is_long(service: Service) -> None:
    service.change(round_trip=500.0)
    service.run(100)
    service.change(round_trip=5.0)


def drafted_rounds_are_slow(service: Service) -> None:
    service.run(60, slower(hidden=4))


def a_crowd_comes(service: Service) -> None:
    sessions = len(service.worlds)
    for seed in range(32 - sessions):
        service.join(replace(service.worlds[0], seed=1000 + seed))
    service.change(token_ms=60.0, branch_ms=60.0)
    service.run(60)
    service.change(token_ms=3.0, branch_ms=3.0)
    service.leave(sessions)


def a_better_draft_worker_comes(service: Service) -> None:
    service.change(acceptance=0.02)
    service.run(200)
    service.change(acceptance=0.8)
    service.another("draft")


#: Rounds of each session after which choices are good again. They are many where nothing tells that what was
#: bad is over: then a session alone decodes plainly until its draft is measured at any price, and one in debt
#: until the debt is small.
EVENTS: dict[Callable[[Service], None], int] = {
    draft_worker_restarts: 20,
    draft_worker_restarts_cold: 360,
    draft_worker_hangs: 420,
    target_worker_restarts_cold: 60,
    coordinator_stops: 20,
    machine_stalls: 20,
    everything_is_slow: 180,
    drafts_are_slow: 660,
    the_way_is_long: 540,
    drafted_rounds_are_slow: 420,
    a_crowd_comes: 60,
    a_better_draft_worker_comes: 60,
}


@pytest.mark.parametrize(("sessions", "length"), [(1, 120), (1, 4000), (8, 4000)])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_no_event_is_remembered_for_good(
    event: Callable[[Service], None], sessions: int, length: int
) -> None:
    shares = []
    for seed in range(3 if sessions == 1 else 1):
        service = Service(World(0.8, 5.0, noise=0.05, stall=0.005, seed=seed), sessions, length)
        service.run(60)
        event(service)
        service.run(EVENTS[event])
        shares.append(service.share(40))
    assert mean(shares) >= 0.9


@pytest.mark.parametrize("sessions", [1, 8])
def test_what_happens_to_the_first_rounds_ever_is_not_remembered_either(sessions: int) -> None:
    """There every estimate has one or two samples."""
    for event in (coordinator_stops, machine_stalls, a_crowd_comes):
        service = Service(World(0.8, 5.0, noise=0.05), sessions, 120)
        service.run(2)
        event(service)
        service.run(120)
        assert service.share(40) >= 0.9, event.__name__


@pytest.mark.parametrize(
    "world", [World(0.8, 5.0, token_ms=60.0, branch_ms=60.0), World(0.8, 200.0), World(0.05, 5.0)]
)
def test_measuring_a_useless_draft_again_and_again_costs_little(world: World) -> None:
    service, made = Service(world, 1, 400), []

    def see(choice: Choice, seen: RoundSeen) -> RoundSeen:
        wait_ms = seen.draft.wait_ms if seen.draft is not None else None
        in_time = (wait_ms or 0) <= 25.3 * (choice.num_draft_tokens + 1)
        made.append(seen if in_time else late(choice, seen))
        return made[-1]

    service.run(400, see)
    made.clear()
    service.run(2400, see)
    assert 25.3 * sum(seen.num_tokens for seen in made) >= 0.975 * sum(seen.duration_ms for seen in made)
    assert sum(seen.num_asked > 0 for seen in made) >= 4


def test_a_proposal_that_comes_too_late_says_nothing_about_its_tokens() -> None:
    service = Service(World(0.9, 5.0), 1, 400)
    service.run(60)
    before = service.shared.draft("draft", "drafter").drafter.acceptance.overall
    choices = service.run(100, late)
    assert {choice.mode for choice in choices[-20:] if not choice.tried} == {Mode.PLAIN}
    after = service.shared.draft("draft", "drafter").drafter.acceptance.overall
    assert after == pytest.approx(before, abs=0.02)


def test_a_draft_that_has_nothing_to_propose_is_asked_as_seldom_as_one_that_is_late() -> None:
    """As a lookup where nothing repeats: each time it costs the way there and back."""
    times = DraftTimes()
    answer = Answer(0.0, 25.3, 25.3)
    asked = 0
    for _ in range(2048):
        check = times.check()
        asked += check
        times.saw(RoundSeen(int(check), 0, 0, 1, 25.3, answer, answer if check else None))
    assert asked <= 4
