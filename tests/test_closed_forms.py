"""The closed forms against the figures that the design was made with, and against a simulation."""

from __future__ import annotations

import random

import pytest
from closed_forms import (  # benchmarks/closed_forms.py
    Site,
    best,
    bound,
    longest_round_trip_ms,
    pipelined,
    plain,
    prefetch_pull,
    prefetch_push,
    sequential,
    tokens_per_round,
    top,
)

from splitspec.types import Mode

#: Tokens/s with the best K up to 16, d = 3, v = 25 + 0.3 n, h = 0.8, by round trip and acceptance:
#: sequential, pipelined, the better prefetch with d_B = 3, and with d_B = 6.
DESIGN = {
    0.5: {0.6: (61, 59, 80, 77), 0.8: (87, 91, 133, 106), 0.95: (149, 195, 229, 142)},
    5: {0.6: (54, 53, 77, 70), 0.8: (79, 84, 125, 99), 0.95: (140, 187, 219, 139)},
    20: {0.6: (39, 40, 59, 48), 0.8: (61, 67, 86, 80), 0.95: (119, 164, 193, 129)},
    50: {0.6: (26, 27, 33, 30), 0.8: (43, 48, 55, 55), 0.95: (91, 132, 130, 113)},
    100: {0.6: (17, 18, 19, 19), 0.8: (29, 32, 35, 35), 0.95: (65, 99, 83, 83)},
}
CELLS = [(round_trip, a) for round_trip, row in DESIGN.items() for a in row]


def site(acceptance: float, round_trip_ms: float, branch_ms: float = 3.0) -> Site:
    return Site(acceptance, 3.0, 25.0, 0.3, round_trip_ms, hit_rate=0.8, branch_ms=branch_ms)


@pytest.mark.parametrize(("round_trip", "a"), CELLS)
def test_the_forms_give_the_figures_of_the_design(round_trip: float, a: float) -> None:
    here, wide = site(a, round_trip), site(a, round_trip, branch_ms=6.0)

    def prefetch(where: Site) -> float:
        return max(best(mode, where).tokens_per_s for mode in (Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH))

    found = (
        best(Mode.SEQUENTIAL, here).tokens_per_s,
        best(Mode.PIPELINED, here).tokens_per_s,
        prefetch(here),
        prefetch(wide),
    )
    assert found == pytest.approx(DESIGN[round_trip][a], abs=0.51)
    assert plain(here) == pytest.approx(40, abs=0.5)


def simulated(where: Site, k: int, rounds: int, pipeline: bool) -> float:
    """Tokens/s of drawn acceptances: rounds one after the other, or a pipeline that rejections empty."""
    draw = random.Random(4)
    tokens, spent_ms, fresh = 0, 0.0, True
    for _ in range(rounds):
        accepted = 0
        while accepted < k and draw.random() < where.acceptance:
            accepted += 1
        if not pipeline:
            tokens += accepted + 1
            spent_ms += k * where.draft_ms + where.round_trip_ms + where.verify_ms(k + 1)
            continue
        tokens += accepted + (accepted < k)
        if fresh:
            spent_ms += k * where.draft_ms + where.round_trip_ms + where.verify_ms(k)
        else:
            spent_ms += max(k * where.draft_ms, where.verify_ms(k))
        fresh = accepted < k
    return tokens / spent_ms * 1e3


@pytest.mark.parametrize("a", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("k", [1, 4, 12])
def test_two_forms_agree_with_drawn_acceptances(a: float, k: int) -> None:
    where = site(a, 20)
    assert sequential(where, k) == pytest.approx(simulated(where, k, 40_000, False), rel=0.02)
    assert pipelined(where, k) == pytest.approx(simulated(where, k, 40_000, True), rel=0.02)


def test_a_hit_hides_the_draft_and_pushed_the_round_trip_too() -> None:
    sure = Site(0.8, 3, 25, 0, 50, hit_rate=1, branch_ms=3)
    tokens = tokens_per_round(0.8, 4)
    assert prefetch_pull(sure, 4) == pytest.approx(1e3 * tokens / 75)
    assert prefetch_push(sure, 4) == pytest.approx(1e3 * tokens / 65)
    missed = Site(0.8, 3, 25, 0, 50, hit_rate=0, branch_ms=3)
    assert prefetch_pull(missed, 4) == prefetch_push(missed, 4) == sequential(missed, 4)


def test_push_beats_pull_when_preparing_is_shorter_than_a_pass() -> None:
    for branch_ms, beats in ((3.0, True), (6.0, False)):
        where = site(0.8, 50, branch_ms)
        assert (where.prepare_ms(6) < where.verify_ms(7)) is beats
        assert (prefetch_push(where, 6) > prefetch_pull(where, 6)) is beats


def test_with_certain_acceptance() -> None:
    sure = Site(1, 3, 25, 0.3, 20)
    nearly = Site(1 - 1e-9, 3, 25, 0.3, 20)
    assert tokens_per_round(1, 4) == 5
    assert pipelined(sure, 4) == pytest.approx(pipelined(nearly, 4), rel=1e-4)


def test_sequential_pays_up_to_its_longest_round_trip() -> None:
    longest = longest_round_trip_ms(site(0.8, 0), 4)
    assert sequential(site(0.8, longest), 4) == pytest.approx(plain(site(0.8, 0)))
    assert longest > 0


@pytest.mark.parametrize(("round_trip", "a"), CELLS)
def test_no_form_passes_the_bound(round_trip: float, a: float) -> None:
    where = site(a, round_trip)
    for k in range(1, 17):
        assert prefetch_push(where, k) <= bound(where, k)
        assert pipelined(where, k) <= 1e3 / where.draft_ms


def test_the_top_choices_are_the_best_of_all_modes() -> None:
    where = site(0.8, 20)
    choices = top(where, 3)
    assert choices[0].tokens_per_s == max(best(mode, where).tokens_per_s for mode in Mode)
    assert [c.tokens_per_s for c in choices] == sorted((c.tokens_per_s for c in choices), reverse=True)
    assert top(where, 1, (Mode.PLAIN,))[0].k == 0
