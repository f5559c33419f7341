"""Forecasts: the table of the closed forms, and what simulated rounds bring."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.control import Choice
from coordinator.control.forecast import Arm, Forecast, Inputs
from splitspec.types import MAX_NUM_DRAFT_TOKENS, Mode
from tests.coordinator.control_world import World

PREFETCH = (Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH)


def inputs(acceptance: float, round_trip_ms: float, branch_ms: float = 3.0, hit_rate: float = 0.8) -> Inputs:
    """d = 3 ms, v = 25 + 0.3 n ms."""
    return Inputs(
        acceptance=(acceptance,) * MAX_NUM_DRAFT_TOKENS,
        plain_ms=25.3,
        pass_ms=25.0,
        position_ms=0.3,
        proposal_ms=0.0,
        token_ms=3.0,
        branch_ms=branch_ms,
        round_trip_ms=round_trip_ms,
        target_round_trip_ms=round_trip_ms / 2,
        hit_rate=hit_rate,
    )


def best_rate(forecast: Forecast, *modes: Mode) -> float:
    return max(forecast.rate(forecast.best(mode, MAX_NUM_DRAFT_TOKENS)) for mode in modes)


@pytest.mark.parametrize(
    ("acceptance", "round_trip_ms", "rates"),
    [
        (0.6, 0.5, (61, 59, 80, 77)),
        (0.6, 100, (17, 18, 19, 19)),
        (0.8, 5, (79, 84, 125, 99)),
        (0.8, 50, (43, 48, 55, 55)),
        (0.95, 0.5, (149, 195, 229, 142)),
        (0.95, 20, (119, 164, 193, 129)),
        (0.95, 100, (65, 99, 83, 83)),
    ],
)
def test_the_closed_forms(acceptance: float, round_trip_ms: float, rates: tuple[int, ...]) -> None:
    """Sequential, pipelined, and the better prefetch for a draft step of 3 and of 6 ms over all branches."""
    quick = Forecast.of(inputs(acceptance, round_trip_ms))
    slow = Forecast.of(inputs(acceptance, round_trip_ms, branch_ms=6.0))
    found = (
        best_rate(quick, Mode.SEQUENTIAL),
        best_rate(quick, Mode.PIPELINED),
        best_rate(quick, *PREFETCH),
        best_rate(slow, *PREFETCH),
    )
    assert tuple(map(round, found)) == rates


@pytest.mark.parametrize("arm", [Arm(Mode.PLAIN, 0), *(Arm(mode, 5) for mode in list(Mode)[1:])])
@pytest.mark.parametrize("acceptance", [0.6, 0.9])
@pytest.mark.parametrize("round_trip", [0.5, 20, 100])
def test_simulated_rounds_agree(arm: Arm, acceptance: float, round_trip: float) -> None:
    world, forecast = World(acceptance, round_trip), Forecast.of(inputs(acceptance, round_trip))
    choice = Choice(arm.mode, arm.num_draft_tokens, forecast.num_ahead(arm, branches=8))
    for _ in range(4000):
        world.play(choice)
    assert 1000 * world.tokens / world.now == pytest.approx(forecast.rate(arm), rel=0.06)


def test_tokens_of_a_round_follow_from_the_acceptance_by_depth() -> None:
    forecast = Forecast.of(replace(inputs(0.5, 0), acceptance=(0.9, 0.5, 0.2)))
    assert forecast.tokens == pytest.approx((1, 1.9, 1.9 + 0.45, 1.9 + 0.45 + 0.09))


@given(
    depths=st.lists(st.floats(0.01, 0.99), min_size=16, max_size=16),
    round_trip_ms=st.floats(0, 300),
    position_ms=st.floats(0, 20),
    branch_ms=st.floats(0.1, 10),
    hit_rate=st.floats(0, 1),
    start=st.integers(1, 16),
    limit=st.integers(1, 16),
)
def test_climbing_finds_the_best_length(
    depths: list[float],
    round_trip_ms: float,
    position_ms: float,
    branch_ms: float,
    hit_rate: float,
    start: int,
    limit: int,
) -> None:
    given = inputs(0.5, round_trip_ms, branch_ms, hit_rate)
    falling = sorted(depths, reverse=True)
    forecast = Forecast.of(replace(given, acceptance=falling, position_ms=position_ms))
    for mode in list(Mode)[1:]:
        best = max(forecast.rate(Arm(mode, k)) for k in range(1, limit + 1))
        assert forecast.rate(forecast.best(mode, limit, start)) >= 0.97 * best


def test_a_position_is_priced_for_all_sessions_in_the_pass() -> None:
    crowd = replace(inputs(0.8, 20), sessions=32)
    assert crowd.verify(5) == pytest.approx(25 + 0.3 * 5 * 32)
    verify = crowd.verify(5, away_ms=40.0)
    assert verify == pytest.approx(25 + 0.3 * 5 + 31 * 0.3 * 5 * verify / (verify + 40))
    assert replace(crowd, sessions=1).verify(5, away_ms=40.0) == pytest.approx(26.5)


def test_under_load_fewer_positions_pay() -> None:
    alone = inputs(0.8, 5)
    lengths = [
        Forecast.of(replace(alone, sessions=sessions)).best(Mode.SEQUENTIAL, 16).num_draft_tokens
        for sessions in (1, 8, 32, 256)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] == 1


@pytest.mark.parametrize(
    ("arm", "round_trip_ms", "expected"),
    [
        (Arm(Mode.PLAIN, 0), 0.0, 1),
        (Arm(Mode.PLAIN, 0), 100.0, 3),
        (Arm(Mode.PLAIN, 0), 10_000.0, 16),
        (Arm(Mode.SEQUENTIAL, 4), 100.0, 0),
        (Arm(Mode.PIPELINED, 4), 5.0, 3),  # (5 + 26.2) / 12
        (Arm(Mode.PIPELINED, 16), 0.0, 1),
        (Arm(Mode.PIPELINED, 1), 100.0, 8),
        (Arm(Mode.PREFETCH_PULL, 4), 5.0, 6),
        (Arm(Mode.PREFETCH_PUSH, 4), 5.0, 6),
    ],
)
def test_how_far_ahead(arm: Arm, round_trip_ms: float, expected: int) -> None:
    assert Forecast.of(inputs(0.8, round_trip_ms)).num_ahead(arm, branches=6) == expected
