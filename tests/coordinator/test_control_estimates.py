"""Estimates: right in the long run, quick after a change, and unmoved by a stall."""

from __future__ import annotations

import random
import statistics

import pytest

from coordinator.control import Answer, RoundSeen, Shared
from coordinator.control.estimates import Acceptance, Line, Recent
from coordinator.control.shared import Drafter, Outcomes, Target
from protos.v1 import common_pb2


def accepted_of(generator: random.Random, chances: list[float]) -> int:
    accepted = 0
    while accepted < len(chances) and generator.random() < chances[accepted]:
        accepted += 1
    return accepted


@pytest.mark.parametrize("v1", [0.3, 3.0])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_line_recovers_the_pass_time(v1: float, noise: float) -> None:
    generator, line = random.Random(1), Line(slope_per_intercept=0.02)
    for _ in range(400):
        n = generator.randint(1, 17)
        line.add(n, (25 + v1 * n) * generator.gauss(1, noise))
    assert line(1) == pytest.approx(25 + v1, rel=0.05)
    assert line(17) == pytest.approx(25 + 17 * v1, rel=0.05)
    assert line.slope == pytest.approx(v1, rel=1e-2 if not noise else 0.5)
    assert line.intercept == pytest.approx(25, rel=1e-2 if not noise else 0.1)


def test_line_keeps_its_slope_while_the_positions_stay_the_same() -> None:
    generator, line = random.Random(1), Line(slope_per_intercept=0.02)
    for i in range(100):
        line.add(1 + i % 17, 25 + 2 * (1 + i % 17))
    for _ in range(500):
        line.add(5, 35 * generator.gauss(1, 0.05))
    assert line.slope == pytest.approx(2, rel=0.25)
    assert line(5) == pytest.approx(35, rel=0.05)


def test_line_leaves_a_stall_out_and_follows_a_change() -> None:
    line = Line(slope_per_intercept=0.02)
    for i in range(50):
        line.add(1 + i % 5, 25 + 0.3 * (1 + i % 5))
    line.add(5, 400)
    assert line(5) == pytest.approx(26.5, rel=0.01)
    line.add(5, 26.5)
    line.add(5, 400)
    assert line(5) == pytest.approx(26.5, rel=0.01)
    line.add(5, 400)  # the second in a row is news
    assert line(5) == pytest.approx(400, rel=0.1)


def test_line_follows_a_slow_drift() -> None:
    line = Line(slope_per_intercept=0.02)
    for i in range(100):
        line.add(5, 25 * (1 + i / 100))
    assert line(5) == pytest.approx(50, rel=0.06)


def test_one_sample_is_spread_by_the_first_guess() -> None:
    line = Line(slope_per_intercept=0.02)
    assert not line.known
    line.add(5, 22)
    assert (line.known, line.intercept, line.slope) == (True, 20, 0.4)


def test_recent_follows_a_jump_within_four_and_no_stall() -> None:
    recent = Recent()
    assert recent.value(7.0) == 7.0
    for sample in (1.0, 1.1, None, 900.0, 0.9, 1.0, 800.0, 1.05, 1.0):
        recent.add(sample)
    assert recent.value(7.0) == pytest.approx(1.0, abs=0.1)
    for _ in range(4):
        recent.add(50.0)
    assert recent.value(7.0) == 50.0


def test_acceptance_is_learned_by_depth() -> None:
    generator, acceptance = random.Random(2), Acceptance(0.99)
    chances = [0.9, 0.9, 0.4, 0.9]
    for _ in range(2000):
        acceptance.add(4, accepted_of(generator, chances))
    assert acceptance.values[:3] == pytest.approx(chances[:3], abs=0.08)


def test_depths_that_are_not_seen_lean_on_those_that_are() -> None:
    acceptance = Acceptance(0.97)
    for i in range(60):
        acceptance.add(2, 2 * (i % 10 < 3))  # the first token passes in three of ten
    assert acceptance.values[0] < 0.4
    assert acceptance.values[1] > 0.7
    assert all(value < 0.6 for value in acceptance.values[2:])


def test_a_shorter_proposal_counts_as_a_failure_where_it_ends() -> None:
    acceptance = Acceptance(0.99)
    for _ in range(300):
        acceptance.add(4, 2)  # two proposed, both accepted
    first, second, third = acceptance.values[:3]
    assert first > 0.9
    assert second > 0.9
    assert third < 0.1


def test_a_session_starts_from_its_drafter_and_goes_its_own_way() -> None:
    drafter = Drafter()
    for _ in range(300):
        drafter.acceptance.add(4, 0)
    session = Outcomes(drafter)
    assert session.acceptance.values[0] == pytest.approx(drafter.acceptance.values[0], abs=0.05)
    for _ in range(60):
        session.acceptance.add(4, 4)
    assert session.acceptance.values[0] > 0.9
    assert Outcomes(drafter).acceptance.values[0] < 0.6


def test_a_session_follows_a_sudden_change_within_fifteen_rounds() -> None:
    before, after = [], []
    for seed in range(21):
        generator, acceptance = random.Random(seed), Acceptance(0.97, Acceptance(0.99))
        for _ in range(200):
            acceptance.add(4, accepted_of(generator, [0.9] * 4))
        before.append(acceptance.overall)
        for _ in range(15):
            acceptance.add(4, accepted_of(generator, [0.3] * 4))
        after.append(acceptance.overall)
    assert statistics.median(before) == pytest.approx(0.9, abs=0.03)
    assert statistics.median(after) < 0.45


def test_a_plain_session_forgets_its_bad_luck() -> None:
    drafter = Drafter()
    for _ in range(300):
        drafter.acceptance.add(4, 4)
        drafter.hits.add(1)
    session, verdict = Outcomes(drafter), Answer(0, 25, 25)
    for _ in range(3):
        session.saw(RoundSeen(4, 4, 0, 1, 50, verdict, Answer(0, 10, 10), hit=False))
    unlucky, missing = session.acceptance.values[0], session.hit_rate
    for _ in range(40):
        session.saw(RoundSeen(0, 0, 0, 1, 25, verdict))
    assert session.acceptance.values[0] > unlucky + 0.1
    assert session.hit_rate > missing + 0.1


def test_what_waits_on_the_target_is_its_load() -> None:
    target = Target()
    assert target.load == 0
    for _ in range(20):
        target.saw(4, Answer(20.0, 20.0, 41.0))
        target.saw(0, Answer(0.0, 20.0, 20.0))
    assert target.load == pytest.approx(0.5, abs=0.02)
    assert target.queue(drafted=False) == 0


def test_a_pass_with_company_tells_of_more_sessions_than_our_own() -> None:
    target = Target()
    target.join("a")
    target.join("b")
    assert target.sessions == 2
    for _ in range(100):
        target.saw(4, Answer(0.0, 50.0, 50.0, positions=50))
    assert target.sessions == pytest.approx(10, rel=0.05)
    target.leave("b")
    target.leave("b")
    assert Target().sessions == 1


def test_what_is_shared_is_bounded_and_the_last_used_stays() -> None:
    shared = Shared()
    target, draft = shared.target("t"), shared.draft("d", "suffix")
    for i in range(300):
        shared.target(f"t{i}")
        shared.draft(f"d{i}", "suffix")
        assert shared.target("t") is target
    assert shared.draft("d", "suffix") is not draft
    assert shared.draft("d", "suffix").drafter is draft.drafter  # one drafter, whatever its worker


def test_an_answer_is_read_from_the_worker_s_timings() -> None:
    timings = common_pb2.ServerTimings(queue_us=1000, model_us=2000, sampling_us=500, total_us=4000)
    answer = Answer.of(timings, wait_s=0.009, positions=7)
    assert (answer.queue_ms, answer.busy_ms, answer.total_ms, answer.positions) == (1.0, 2.5, 4.0, 7)
    assert answer.round_trip_ms == pytest.approx(5.0)
    assert Answer.of(timings).round_trip_ms is None
    assert Answer.of(timings, wait_s=0.003).round_trip_ms == 0
