"""The token and the block rule, with every kind of chain, emit the target's joint law to floating point."""

from __future__ import annotations

import pytest

from splitspec.types import Rule, Sampling
from tests.exactness import drafting, law, tables, wrong
from tests.exactness.drafting import Propose, chain
from tests.exactness.law import Implementation, decide_by
from tests.exactness.tables import Model

RULES = [Rule.TOKEN, Rule.BLOCK]
DRAFTERS: dict[str, Propose] = {
    "full": chain(drafting.drawn),
    "top2": chain(drafting.drawn_from_top(2)),
    "top1": chain(drafting.drawn_from_top(1)),
    "certain": chain(drafting.certain),
    "lost": chain(drafting.lost),
    # A token outside of what was sent counts as one-hot; of one inside, what was sent is the law.
    "sent without the drawn token": chain(wrong.top_after_the_draw),
    "mixed": chain(drafting.mixed),
    "up to unlikely": drafting.up_to_unlikely,
}
SAMPLING = Sampling(temperature=0.7, top_k=3, top_p=0.9)
#: Pairs of target and draft.
TABLES: dict[str, tuple[Model, Model]] = {
    "random": (tables.random_model(3, 1), tables.random_model(3, 2)),
    "equal": (tables.random_model(3, 3), tables.random_model(3, 3)),
    "disjoint": (tables.random_model(4, 4, allowed=[0, 2]), tables.random_model(4, 5, allowed=[1, 3])),
    "processed": (tables.processed_model(4, 6, SAMPLING), tables.processed_model(4, 7, SAMPLING)),
    "no zeros": (
        tables.processed_model(3, 8, Sampling(temperature=0.7)),
        tables.processed_model(3, 9, Sampling(temperature=1.5)),
    ),
    "five tokens": (tables.random_model(5, 10), tables.random_model(5, 11)),
    "four tokens": (tables.random_model(4, 12), tables.random_model(4, 13)),
    "two tokens": (
        tables.processed_model(2, 14, Sampling()),
        tables.processed_model(2, 15, Sampling()),
    ),
}


def assert_exact(rule: Rule, tables: str, drafter: str, length: int, num_draft_tokens: int) -> None:
    p, q = TABLES[tables]
    implementation = Implementation(DRAFTERS[drafter], decide_by(rule))
    emitted = law.emitted_law(implementation, p, q, length, num_draft_tokens)
    law.assert_exact(emitted, law.target_law(p, length))


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tables", ["random", "equal", "disjoint", "processed"])
@pytest.mark.parametrize("rule", RULES)
def test_three_tokens(rule: Rule, tables: str, drafter: str, num_draft_tokens: int) -> None:
    assert_exact(rule, tables, drafter, 3, num_draft_tokens)


@pytest.mark.parametrize(("length", "num_draft_tokens"), [(3, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tables", ["no zeros", "five tokens"])
@pytest.mark.parametrize("rule", RULES)
def test_tables_with_more_outcomes(
    rule: Rule, tables: str, drafter: str, length: int, num_draft_tokens: int
) -> None:
    assert_exact(rule, tables, drafter, length, num_draft_tokens)


@pytest.mark.parametrize("drafter", ["full", pytest.param("mixed", marks=pytest.mark.full)])
@pytest.mark.parametrize("rule", RULES)
def test_four_tokens(rule: Rule, drafter: str) -> None:
    assert_exact(rule, "four tokens", drafter, 4, 4)


@pytest.mark.full
@pytest.mark.parametrize("num_draft_tokens", [5, 6, 7, 8])
@pytest.mark.parametrize("drafter", ["full", "mixed"])
@pytest.mark.parametrize("tables", ["random", "two tokens"])
@pytest.mark.parametrize("rule", RULES)
def test_long_chains(rule: Rule, tables: str, drafter: str, num_draft_tokens: int) -> None:
    assert_exact(rule, tables, drafter, 4, num_draft_tokens)


@pytest.mark.parametrize("rule", RULES)
def test_all_rounds_in_one_enumeration(rule: Rule) -> None:
    """With streams that are kept from round to round, each used again if a rule asked for it twice."""
    p, q = TABLES["two tokens"]
    implementation = Implementation(DRAFTERS["mixed"], decide_by(rule))
    law.assert_exact(law.session_law(implementation, p, q, 4, 2), law.target_law(p, 4))
