"""Which verdicts are prepared for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from draft_worker.fan_out import FanOut
from splitspec.wire import Draft

CHAIN = Draft.certain(range(4))
#: Two children of the committed tokens; the first has two, of which the first has one.
TREE = Draft.certain([5, 6, 7, 8, 9], [0, 1, 2, 1, 0])
BUDGET = 6


def chances(draft: Draft, a: float) -> list[float]:
    """That a verdict ends at each place, when each draft token that is looked at is accepted by chance a."""
    found = []
    for path, nodes in zip(draft.paths, draft.children, strict=True):
        chance = (1 - a) ** len(nodes)
        for end in range(len(path)):
            siblings = [draft.token_ids[node] for node in draft.children[draft.paths.index(path[:end])]]
            chance *= a * (1 - a) ** siblings.index(path[end])
        found.append(chance)
    return found


@pytest.mark.parametrize("draft", [CHAIN, TREE], ids=["chain", "tree"])
def test_no_other_allocation_hits_more_often(draft: Draft) -> None:
    fan_out = FanOut()
    ends = chances(draft, fan_out.acceptance)
    assert sum(ends) == pytest.approx(1)

    def hits(counts: tuple[int, ...]) -> float:
        left = (np.array(counts) + 1.0) ** -fan_out.exponent
        return float(np.dot(ends, 1 - left))

    places = len(ends)
    counts = fan_out.counts(draft, BUDGET)
    best = max(
        hits(counts)
        for counts in itertools.product(range(BUDGET + 1), repeat=places)
        if sum(counts) == BUDGET
    )
    assert sum(counts) == BUDGET
    assert hits(tuple(counts)) == pytest.approx(best)


@pytest.mark.parametrize("draft", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("a", "r"), [(0.3, 0.5), (0.8, 1.5)])
def test_fitted_to_verdicts_of_its_own_law(draft: Draft, a: float, r: float) -> None:
    """It forgets what is long ago, so it is right up to what some 50 verdicts say: the mean of many fits."""
    rng = np.random.default_rng(0)
    ends = chances(draft, a)
    fan_out, acceptances = FanOut(), []
    for _ in range(3000):
        prepared = fan_out.counts(draft, BUDGET)
        place = int(rng.choice(len(ends), p=ends))
        # The rank has the tail (F + 1)**-r.
        rank = int(np.ceil(rng.random() ** (-1 / r))) - 1
        fan_out.saw(draft, place, prepared, rank if 1 <= rank <= prepared[place] else 0)
        acceptances.append(fan_out.acceptance)
    assert np.mean(acceptances[200:]) == pytest.approx(a, abs=0.03)


def test_misses_widen_and_hits_narrow() -> None:
    """What surely ends at the first place is prepared for there alone."""
    fan_out = FanOut()
    for _ in range(50):
        fan_out.saw(CHAIN, 0, fan_out.counts(CHAIN, BUDGET), 1)
    assert fan_out.counts(CHAIN, BUDGET)[0] >= BUDGET - 1
    before = fan_out.exponent
    for _ in range(50):
        fan_out.saw(CHAIN, 0, fan_out.counts(CHAIN, BUDGET), 0)
    assert fan_out.exponent < before / 2
