"""The control against simulated workers: what it settles to, how soon, and what its tries cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from statistics import mean

import pytest

from coordinator.control import Answer, Choice, Controller, RoundSeen, Shared
from coordinator.control.forecast import Arm, Forecast, Inputs
from splitspec.telemetry import names
from splitspec.types import MAX_NUM_DRAFT_TOKENS, Mode
from tests.coordinator.control_world import Crowd, World

GRID = [(a, r) for a in (0.6, 0.8, 0.95) for r in (0.5, 5.0, 20.0, 50.0, 100.0)]
DRAFTED = [mode for mode in Mode if mode is not Mode.PLAIN]


def controller(shared: Shared | None = None, **options: object) -> Controller:
    control = Controller(shared or Shared(), "target", **options)  # type: ignore[arg-type]
    control.use_draft("draft", "drafter")
    return control


def truth(world: World) -> Forecast:
    """The forecast from what the world really is."""
    return Forecast.of(
        Inputs(
            acceptance=(world.acceptance,) * MAX_NUM_DRAFT_TOKENS,
            plain_ms=world.pass_ms + world.position_ms,
            pass_ms=world.pass_ms,
            position_ms=world.position_ms,
            proposal_ms=0.0,
            token_ms=world.token_ms,
            branch_ms=world.branch_ms,
            round_trip_ms=world.round_trip,
            target_round_trip_ms=world.round_trip / 2,
            hit_rate=world.hit_rate,
        )
    )


def play(control: Controller, world: World, rounds: int) -> list[Choice]:
    choices = []
    for _ in range(rounds):
        choices.append(control.choose(MAX_NUM_DRAFT_TOKENS))
        control.observe(world.play(choices[-1]))
    return choices


def share_of_best(world: World, choices: Collection[Choice]) -> float:
    """Mean true rate of the choices, tries included, over that of the best fixed choice."""
    forecast = truth(world)
    best = max(forecast.rate(forecast.best(mode, MAX_NUM_DRAFT_TOKENS)) for mode in Mode)
    return mean(forecast.rate(Arm(c.mode, c.num_draft_tokens)) / best for c in choices)


def settled(before: World, after: Callable[[World], None], rounds: int = 60) -> float:
    """Play, change the world, and see what is chosen from the 20th round on after the change."""
    control = controller()
    play(control, before, rounds)
    after(before)
    play(control, before, 20)
    return share_of_best(before, play(control, before, 20))


@pytest.mark.parametrize(("acceptance", "round_trip"), GRID)
def test_settles_within_twenty_rounds(acceptance: float, round_trip: float) -> None:
    """With a drafter that an earlier request has met. A session's luck differs, so over twenty of them."""
    shares = []
    for seed in range(20):
        shared = Shared()
        world = World(acceptance, round_trip, noise=0.05, stall=0.01, seed=seed)
        first = controller(shared)
        play(first, world, 60)
        first.close()
        control = controller(shared)
        play(control, world, 20)
        shares.append(share_of_best(world, play(control, world, 40)))
    # Where the best is a gamble on long proposals, some sessions take plain decoding instead.
    gamble = (acceptance, round_trip) in [(0.8, 50.0), (0.95, 100.0)]
    assert mean(shares) >= (0.8 if gamble else 0.9)


@pytest.mark.parametrize(
    ("before", "change"),
    [
        (World(0.8, 1.0), {"round_trip": 50.0}),
        (World(0.95, 1.0), {"round_trip": 50.0}),
        (World(0.9, 0.5), {"acceptance": 0.4}),
        (World(0.9, 5.0), {"acceptance": 0.4}),
        (World(0.9, 50.0), {"acceptance": 0.4}),
        (World(0.9, 0.5), {"pass_ms": 75.0}),
        (World(0.8, 0.5), {"hit_rate": 0.1}),
        (World(0.8, 0.5), {"token_ms": 12.0, "branch_ms": 12.0}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else f"{value.acceptance}, {value.round_trip} ms",
)
def test_settles_within_twenty_rounds_of_a_change(before: World, change: dict[str, float]) -> None:
    def after(world: World) -> None:
        for name, value in change.items():
            setattr(world, name, value)

    assert mean(settled(replace(before, seed=seed), after) for seed in range(10)) >= 0.9


def test_rounds_forecast_with_the_old_round_trip_count_against_no_mode() -> None:
    """Until a jump is known they take longer than forecast, as rounds do that share cores with a draft."""

    def after(world: World) -> None:
        world.round_trip = 50.0

    worlds = [World(0.8, 1.0, noise=0.05, stall=0.01, seed=seed) for seed in range(20)]
    assert mean(settled(world, after) for world in worlds) >= 0.96


@pytest.mark.parametrize(
    ("acceptance", "round_trip"),
    [
        (0.05, 0.5),
        (0.05, 20.0),
        (0.05, 100.0),
        (0.3, 20.0),
        (0.3, 50.0),
        (0.3, 100.0),
        (0.6, 50.0),
        (0.6, 100.0),
    ],
)
def test_a_draft_that_pays_nothing_costs_less_than_three_percent(
    acceptance: float, round_trip: float
) -> None:
    """Over the first three requests ever. What is spent on finding out is spent once, in the first."""
    first, later = [], []
    for seed in range(6):
        world, shared = World(acceptance, round_trip, hit_rate=0.2, seed=seed), Shared()
        first.append(speed_over_plain(shared, world))
        later += [speed_over_plain(shared, world) for _ in range(2)]
    assert mean(first) >= 0.95
    assert mean(later) >= 0.98
    assert mean([*first, *later]) >= 0.97


def speed_over_plain(shared: Shared, world: World) -> float:
    """Of a request of 400 tokens."""
    control, began, end = controller(shared), world.now, world.tokens + 400
    while world.tokens < end:
        choice = control.choose(min(MAX_NUM_DRAFT_TOKENS, end - world.tokens - 1))
        control.observe(world.play(choice))
    control.close()
    return 400 * (world.pass_ms + world.position_ms) / (world.now - began)


def test_rounds_that_are_slower_than_forecast_are_given_up() -> None:
    """What no estimate knows of, such as a coordinator at its limit, is seen on the account."""
    world, control = World(0.8, 5.0), controller()
    end = 1500
    while world.tokens < end:
        choice = control.choose(MAX_NUM_DRAFT_TOKENS)
        seen = world.play(choice)
        hidden = 150.0 if choice.num_draft_tokens else 0.0
        world.now += hidden
        control.observe(replace(seen, duration_ms=seen.duration_ms + hidden))
    assert world.tokens * (world.pass_ms + world.position_ms) / world.now >= 0.95


def test_noise_and_stalls_don_t_make_it_waver() -> None:
    switches = []
    for acceptance, round_trip in GRID:
        world, control = World(acceptance, round_trip, noise=0.1, stall=0.02), controller()
        play(control, world, 40)
        kept = [(c.mode, c.num_draft_tokens) for c in play(control, world, 100) if not c.tried]
        switches.append(sum(a != b for a, b in itertools.pairwise(kept)))
    assert mean(switches) <= 5


def test_a_choice_is_kept_until_another_is_five_percent_better() -> None:
    """Everything is accepted, and the round trip grows until plain decoding is the better choice."""
    world, control = World(1.0, 100.0), controller(modes=[Mode.SEQUENTIAL])
    play(control, world, 100)
    edges = []
    while (choice := control.choose(16)).mode is not Mode.PLAIN or choice.tried:
        control.observe(world.play(choice))
        world.round_trip += 1.0
        edges.append(plain_over_drafted(choice))
    assert 1.0 < max(edges) < 1.051
    assert plain_over_drafted(choice) > 1.05


def plain_over_drafted(choice: Choice) -> float:
    """How the two compare by what the control knew."""
    assert choice.inputs is not None
    forecast = Forecast.of(choice.inputs)
    return forecast.rate(Arm(Mode.PLAIN, 0)) / forecast.rate(forecast.best(Mode.SEQUENTIAL, 16))


def crowd_rate(
    choose: Callable[[int], Choice], observe: Callable[[int, RoundSeen], None], world: World
) -> float:
    """Tokens/s of 32 sessions from their 20th round on or so; one of them is there before the others."""
    crowd = Crowd(world, choose, observe)
    crowd.join(0)
    crowd.run(2000)
    for session in range(1, 32):
        crowd.join(session)
    crowd.run(3500)
    began, tokens = crowd.now, crowd.tokens
    crowd.run(9000)
    return 1000 * (crowd.tokens - tokens) / (crowd.now - began)


@pytest.mark.parametrize(
    ("world", "of_best"),
    [
        (World(0.8, 5.0), 0.82),
        (World(0.6, 20.0), 0.95),
        (World(0.9, 1.0, position_ms=3.0), 0.93),
        (World(0.6, 0.5, position_ms=1.0), 0.97),
        (World(0.8, 50.0), 0.95),
        (World(0.4, 1.0, position_ms=3.0), 0.97),
    ],
    ids=lambda value: f"{value.acceptance}, {value.round_trip} ms" if isinstance(value, World) else "",
)
def test_a_loaded_target_is_never_made_slower_than_plain(world: World, of_best: float) -> None:
    """From 1 to 32 sessions at once, and 1 to 3 ms a position: there a session's best is not that of all."""

    def fixed(k: int) -> float:
        choice = Choice(Mode.SEQUENTIAL if k else Mode.PLAIN, k, 1)
        return crowd_rate(lambda _: choice, lambda _, seen: None, replace(world))

    shared = Shared()
    controls: dict[int, Controller] = {}

    def choose(session: int) -> Choice:
        if session not in controls:
            controls[session] = controller(shared, modes=[Mode.SEQUENTIAL])
        return controls[session].choose(MAX_NUM_DRAFT_TOKENS)

    rate = crowd_rate(choose, lambda session, seen: controls[session].observe(seen), replace(world))
    rates = [fixed(k) for k in range(9)]
    assert rate >= of_best * max(rates)
    assert rate >= 0.96 * rates[0]


@pytest.mark.parametrize("known", [True, False], ids=["seen before", "not seen before"])
def test_what_was_measured_in_a_crowd_is_not_held_against_a_session_alone(known: bool) -> None:
    """Drafts are slow there, and all decode plainly in the end, which tells nothing more about drafts."""
    shared, calm = Shared(), World(0.8, 5.0)
    if known:
        first = controller(shared)
        play(first, replace(calm), 40)
        first.close()
    busy = [replace(calm, token_ms=60.0, branch_ms=60.0, seed=seed) for seed in range(32)]
    crowd = [controller(shared) for _ in busy]
    for _ in range(60):
        choices = [control.choose(MAX_NUM_DRAFT_TOKENS) for control in crowd]
        for control, choice, world in zip(crowd, choices, busy, strict=True):
            control.observe(world.play(choice, queue=lambda positions: 100.0 * (positions > 1)))
    assert all(choice.mode is Mode.PLAIN or choice.tried for choice in choices)
    for control in crowd[1:]:
        control.close()
    for alone in (controller(shared), crowd[0]):
        play(alone, calm, 20)
        assert share_of_best(calm, play(alone, calm, 20)) >= 0.9
        alone.close()


def test_branches_are_priced_as_if_all_sessions_prepared_them() -> None:
    """Alone a token takes 3 ms, among 32 sessions 9, with little more for branches while few prepare any."""
    shared, calm = Shared(), World(0.8, 5.0)
    first = controller(shared)
    assert play(first, calm, 40)[-1].mode in (Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH)
    worlds = [replace(calm, token_ms=9.0, branch_ms=9.0, seed=seed) for seed in range(31)]
    crowd = [controller(shared) for _ in worlds]
    for _ in range(30):
        choices = [play(control, world, 1)[0] for control, world in zip(crowd, worlds, strict=True)]
    meant = {choice.mode for choice in choices if not choice.tried}
    assert meant <= {Mode.PLAIN, Mode.SEQUENTIAL, Mode.PIPELINED}


def test_the_first_round_is_plain_and_without_a_draft_worker_all_are() -> None:
    control = Controller(Shared(), "target")
    world = World(0.95, 0.5)
    assert {choice.mode for choice in play(control, world, 40)} == {Mode.PLAIN}
    fresh = controller()
    first, *others = play(fresh, World(0.95, 0.5), 10)
    assert first == Choice(Mode.PLAIN, 0, 1)
    assert Mode.PLAIN not in {choice.mode for choice in others}


def test_the_limit_is_kept() -> None:
    control = controller()
    world = World(0.95, 20.0)
    play(control, world, 30)
    for limit in (16, 9, 3, 1, 0, 0, 5):
        for _ in range(20):
            choice = control.choose(limit)
            assert choice.num_draft_tokens <= limit
            assert (choice.mode is Mode.PLAIN) == (choice.num_draft_tokens == 0)
            control.observe(world.play(choice))


@pytest.mark.parametrize("mode", list(Mode))
def test_a_pinned_mode_is_kept_whatever_it_costs(mode: Mode) -> None:
    _, *choices = play(controller(mode=mode), World(0.05, 100.0), 100)
    assert {choice.mode for choice in choices} == {mode}


@pytest.mark.parametrize("k", [0, 1, 7])
def test_a_pinned_length_is_kept_and_only_the_limit_shortens_it(k: int) -> None:
    control = controller(num_draft_tokens=k)
    _, *choices = play(control, World(0.05, 100.0), 100)
    assert {choice.num_draft_tokens for choice in choices} == {k}
    assert control.choose(3).num_draft_tokens == min(k, 3)
    assert control.choose(16).num_draft_tokens == k


def test_pinned_in_both_it_never_tries_another() -> None:
    control = controller(mode=Mode.PIPELINED, num_draft_tokens=4)
    _, *choices = play(control, World(0.8, 5.0), 100)
    assert {(choice.mode, choice.num_draft_tokens, choice.tried) for choice in choices} == {
        (Mode.PIPELINED, 4, False)
    }


@pytest.mark.parametrize("allowed", [[Mode.SEQUENTIAL], [Mode.PIPELINED], [Mode.PREFETCH_PULL], DRAFTED])
def test_modes_that_are_not_allowed_are_never_chosen(allowed: list[Mode]) -> None:
    for acceptance, round_trip in GRID:
        choices = play(controller(modes=allowed), World(acceptance, round_trip), 60)
        assert {choice.mode for choice in choices} <= {Mode.PLAIN, *allowed}


def test_it_tries_neighbours_other_modes_and_plain_on_a_schedule() -> None:
    choices = play(controller(), World(0.8, 0.5, noise=0.05), 200)
    tried = [choice for choice in choices if choice.tried]
    assert 5 <= len(tried) <= 15
    assert {Mode.PLAIN, Mode.PREFETCH_PUSH} <= {choice.mode for choice in tried}


def test_a_try_waits_until_the_tokens_granted_before_have_come() -> None:
    control, world = controller(modes=[Mode.SEQUENTIAL]), World(0.8, 100.0)
    while not (choice := control.choose(16)).tried:
        control.observe(world.play(choice))
    for _ in range(3):
        control.observe(world.play(Choice(Mode.PLAIN, 0, 1)))
        assert control.choose(16).tried
    control.observe(world.play(choice))
    assert not control.choose(16).tried


def test_the_same_rounds_give_the_same_choices() -> None:
    assert play(controller(), World(0.8, 20.0), 200) == play(controller(), World(0.8, 20.0), 200)


def test_a_draft_worker_that_is_always_late_is_not_waited_for() -> None:
    control, verdict = controller(), Answer(0.0, 25.0, 25.0)
    asked = 0
    for _ in range(300):
        choice = control.choose(16)
        asked += bool(choice.num_draft_tokens)
        waited = 100.0 if choice.num_draft_tokens else 0.0
        control.observe(RoundSeen(choice.num_draft_tokens, 0, 0, 1, 25 + waited, verdict))
    assert asked <= 12


def test_another_draft_worker_keeps_what_is_known_of_the_drafter() -> None:
    shared = Shared()
    control, world = controller(shared, modes=[Mode.SEQUENTIAL]), World(0.05, 5.0)
    play(control, world, 60)
    control.use_draft("another worker", "drafter")
    assert {choice.mode for choice in play(control, world, 8) if not choice.tried} == {Mode.PLAIN}
    control.use_draft("another worker", "another drafter")
    assert control.choose(16).mode is not Mode.PLAIN


def test_another_target_worker_begins_with_a_plain_round() -> None:
    shared = Shared()
    control = controller(shared)
    play(control, World(0.9, 0.5), 10)
    control.use_target("another")
    assert shared.target("target").sessions == shared.target("another").sessions == 1
    assert control.choose(16) == Choice(Mode.PLAIN, 0, 1)


def test_a_closed_session_is_no_load() -> None:
    shared = Shared()
    controls = [controller(shared) for _ in range(5)]
    assert shared.target("target").sessions == 5
    for control in controls[1:]:
        control.close()
    assert shared.target("target").sessions == 1


def test_attributes_name_the_decision_and_its_inputs() -> None:
    control, world = controller(), World(0.8, 5.0)
    first, *_, last = play(control, world, 30)
    assert first.attributes() == {
        names.MODE: "plain",
        names.CONTROL_NUM_DRAFT_TOKENS: 0,
        names.CONTROL_NUM_AHEAD: 1,
        names.CONTROL_TRIED: False,
    }
    attributes = last.attributes()
    ours = {a for a in names.ROUND_SPAN.attributes if a.name.startswith("splitspec.control.")}
    assert set(attributes) == {names.MODE, *ours}
    k = last.num_draft_tokens
    assert attributes[names.MODE] == last.mode.name.lower() == "prefetch_push"
    assert attributes[names.CONTROL_PASS_MS] == pytest.approx(25.3 + 0.3 * k, rel=0.05)
    assert attributes[names.CONTROL_DRAFT_MS] == pytest.approx(3 * k, rel=0.05)
    assert attributes[names.CONTROL_ROUND_TRIP_MS] == pytest.approx(5)
    assert len(attributes[names.CONTROL_ACCEPTANCE]) == k  # type: ignore[arg-type]


def test_a_mode_that_is_slower_than_its_forecast_is_left() -> None:
    """As on one machine, where what is drafted ahead takes the target's cores: no worker's time shows it."""
    control, world = controller(), World(acceptance=0.8, round_trip=0.5)
    before = play(control, world, 60)[-20:]
    assert Mode.SEQUENTIAL not in {choice.mode for choice in before}
    for _ in range(200):
        choice = control.choose(MAX_NUM_DRAFT_TOKENS)
        seen = world.play(choice)
        alone = choice.mode in (Mode.PLAIN, Mode.SEQUENTIAL)
        control.observe(seen if alone else replace(seen, duration_ms=2.5 * seen.duration_ms))
    assert control.choose(MAX_NUM_DRAFT_TOKENS).mode is Mode.SEQUENTIAL
