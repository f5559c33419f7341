"""Trees of every kind emit the target's joint law; how many tokens are accepted is what theory says."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from splitspec.sampling.randomness import CounterNoise
from splitspec.types import Rule, Sampling
from splitspec.verification.outcome import Outcome
from splitspec.verification.rules import decide, rule_for
from splitspec.verification.tree_recursive import verify_tree_recursive
from splitspec.wire import Draft, SparseDistribution
from tests.exactness import drafting, law, tables
from tests.exactness.drafting import Propose, top, tree
from tests.exactness.law import TOLERANCE, Implementation, decide_by
from tests.exactness.tables import Model, TableRows

DRAFTERS: dict[str, Propose] = {
    "top 2, 2": tree(drafting.top_children, 2, 2),
    "top 3, 1": tree(drafting.top_children, 3, 1),
    "drawn 2, 1": tree(drafting.drawn_children(4), 2, 1),
    "drawn 1, 2": tree(drafting.drawn_children(4), 1, 2),
    "drawn 3": tree(drafting.drawn_children(4), 3),
    "drawn 2, 1 of the top 2": tree(drafting.drawn_children(2), 2, 1),
    "certain and drawn rows": tree(drafting.alternating, 2, 1),
}
PROCESSED = Sampling(temperature=0.7, top_k=3, top_p=0.9)
TABLES: dict[str, tuple[Model, Model]] = {
    "random": (tables.random_model(3, 1), tables.random_model(3, 2)),
    "four tokens": (tables.random_model(4, 12), tables.random_model(4, 13)),
    "equal": (tables.random_model(3, 3), tables.random_model(3, 3)),
    "disjoint": (tables.random_model(4, 4, allowed=[0, 2]), tables.random_model(4, 5, allowed=[1, 3])),
    "processed": (tables.processed_model(4, 6, PROCESSED), tables.processed_model(4, 7, PROCESSED)),
    "no zeros": (
        tables.processed_model(3, 8, Sampling(temperature=0.7)),
        tables.processed_model(3, 9, Sampling(temperature=1.5)),
    ),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tables", TABLES)
def test_three_tokens(tables: str, drafter: str, depth: int) -> None:
    p, q = TABLES[tables]
    implementation = Implementation(DRAFTERS[drafter], decide_by(Rule.BLOCK))
    law.assert_exact(law.emitted_law(implementation, p, q, 3, depth), law.target_law(p, 3))


@pytest.mark.full
@pytest.mark.parametrize("widths", [(2, 2), (3, 2), (2, 1, 1)])
@pytest.mark.parametrize("tables", ["random", "four tokens"])
def test_larger_trees(tables: str, widths: tuple[int, ...]) -> None:
    p, q = TABLES[tables]
    implementation = Implementation(tree(drafting.drawn_children(4), *widths), decide_by(Rule.BLOCK))
    law.assert_exact(law.emitted_law(implementation, p, q, 3, 3), law.target_law(p, 3))


def test_all_rounds_in_one_enumeration() -> None:
    p, q = TABLES["random"]
    implementation = Implementation(DRAFTERS["drawn 2, 1"], decide_by(Rule.TOKEN))
    law.assert_exact(law.session_law(implementation, p, q, 3, 2), law.target_law(p, 3))


def accepted(propose: Propose, p: Model, q: Model) -> float:
    """P(a child of the committed tokens is accepted)."""
    implementation = Implementation(propose, decide_by(Rule.TOKEN))
    outcomes = law.round_law(implementation, p, q, (), 1)
    return math.fsum(mass for (_, outcome), mass in outcomes.items() if outcome.num_accepted)


@pytest.mark.parametrize("seed", range(5))
def test_top_m_accepts_the_mass_of_the_children(seed: int) -> None:
    p, q = tables.random_model(5, 2 * seed), tables.random_model(5, 2 * seed + 1)
    for m in range(1, 5):
        children = top(q((), ((),)).probabilities(0), m).ids.tolist()
        mass = float(p((), ((),)).probabilities(0)[children].sum())
        assert accepted(tree(drafting.top_children, m), p, q) == pytest.approx(mass, abs=TOLERANCE)


@pytest.mark.parametrize("seed", range(5))
def test_recursive_rejection_accepts_what_is_left_by_each_rejection(seed: int) -> None:
    """One child: sum of min(p, q). Two: also each first one's rejection times the overlap of the rest."""
    p_model = tables.processed_model(4, 2 * seed, Sampling())
    q_model = tables.processed_model(4, 2 * seed + 1, Sampling())
    p = p_model((), ((),)).probabilities(0).numpy()
    sent = top(q_model((), ((),)).probabilities(0), 4)
    q = np.array([sent.probability(token) for token in range(4)])
    one = np.minimum(p, q).sum()
    two = one
    rest = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    for first in range(4):
        left = np.where(np.arange(4) == first, 0, q) / (1 - q[first])
        two += (q[first] - min(p[first], q[first])) * np.minimum(rest, left).sum()
    for m, expected in ((1, one), (2, two)):
        found = accepted(tree(drafting.drawn_children(4), m), p_model, q_model)
        assert found == pytest.approx(expected, abs=TOLERANCE)


def test_children_that_cover_the_vocabulary_are_never_all_refused() -> None:
    """What Sequoia (2402.12374) asks of a rule for trees, its cover property."""
    p, q = TABLES["no zeros"]
    assert accepted(tree(drafting.drawn_children(3), 3), p, q) == pytest.approx(1, abs=TOLERANCE)


def test_acceptance_grows_with_the_number_of_children() -> None:
    p, q = tables.processed_model(4, 31, Sampling()), tables.processed_model(4, 32, Sampling())
    rates = [accepted(tree(drafting.drawn_children(4), m), p, q) for m in range(1, 5)]
    assert all(more > fewer + 1e-3 for fewer, more in itertools.pairwise(rates))


TWO = SparseDistribution(np.array([0, 1], np.uint32), np.array([1, 1], np.uint16))


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (Draft.certain((0, 1)), Rule.BLOCK),
        (Draft((0, 1), (TWO, None)), Rule.BLOCK),
        (Draft((), ()), Rule.BLOCK),
        (Draft.certain((0, 1), (0, 0)), Rule.TREE_TOP_M),
        (Draft((0, 1), (TWO, None, None), (0, 0)), Rule.TREE_RECURSIVE),
    ],
)
def test_a_tree_brings_its_rule_where_equality_is_not_asked_for(draft: Draft, expected: Rule) -> None:
    assert rule_for(Rule.BLOCK, draft) is expected
    assert rule_for(Rule.TOKEN, draft) in (expected, Rule.TOKEN)
    assert rule_for(Rule.GREEDY, draft) is Rule.GREEDY
    assert rule_for(Rule.SHARED_NOISE, draft) is Rule.SHARED_NOISE


def test_path_and_origin_of_a_tree() -> None:
    """0 -> 2 and 1 -> 3 under the root: the path holds nodes, and a leaf makes the next token a bonus."""
    sure = torch.eye(4, dtype=torch.float64)
    draft = Draft.certain((0, 1, 2, 3), (0, 0, 1, 2))
    for rule in (Rule.GREEDY, Rule.BLOCK, Rule.SHARED_NOISE):
        rows = TableRows([sure[1], sure[0], sure[3], sure[0], sure[2]])
        assert decide(rule, rows, draft, 7, CounterNoise(1, 1)) == Outcome(4, (1, 3), 2, complete=True)
        rows = TableRows([sure[1], sure[0], sure[2], sure[0], sure[2]])
        assert decide(rule, rows, draft, 7, CounterNoise(1, 1)) == Outcome(4, (1,), 2, complete=False)


def test_a_rejection_that_rounding_leaves_nothing_after_keeps_p() -> None:
    """A ratio of 1 is never refused but by rounding; then the token is drawn from p, and none is lost."""

    class Refusing(CounterNoise):
        def accepts(self, index: int, numerator: float, denominator: float) -> bool:
            return False

    p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    draft = Draft((0,), (TWO, None), (0,))
    found = {verify_tree_recursive(TableRows([p, p]), draft, Refusing(seed, 1)).path for seed in range(50)}
    assert found == {(), (0,)}
