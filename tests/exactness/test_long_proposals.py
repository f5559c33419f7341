"""Proposals of 16 tokens: every draw of a round is its own, and the law holds where others end.

That no two draws share a stream is seen in the streams themselves, for every pair; the law is enumerated on
tables that are certain but at a few places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from draft_worker.drawing import DraftCounterNoise
from draft_worker.eagle.trees import Growth, Round, chain, fixed_tree
from splitspec.sampling.randomness import CounterNoise, Purpose
from splitspec.sampling.rows import Rows
from splitspec.types import MAX_NUM_DRAFT_TOKENS, Rule
from splitspec.verification.outcome import Outcome
from splitspec.verification.rules import decide
from splitspec.wire import Draft, SparseDistribution
from tests.exactness import drafting, law, tables
from tests.exactness.asked import Asked, recording
from tests.exactness.drafting import Propose, tree
from tests.exactness.law import Implementation, decide_by
from tests.exactness.tables import Model, Prefix, TableRows
from tests.exactness.test_growths import grown

K = MAX_NUM_DRAFT_TOKENS
SEED, ROUND, BASE = 5, 1234, 99_990
HALF = SparseDistribution(np.array([0, 1], np.uint32), np.ones(2, np.uint16))
EVEN = torch.tensor([0.5, 0.5], dtype=torch.float64)
#: With a draft of tokens 1: each is refused but once in 2**50.
UNLIKELY = torch.tensor([1 - 2.0**-50, 2.0**-50], dtype=torch.float64)
CHAIN = Draft((1,) * K, (HALF,) * K)
CERTAIN_TREE = Draft.certain((1,) * K, range(K))
DRAWN_TREE = Draft((1,) * K, (*[HALF] * K, None), tuple(range(K)))
#: Sixteen children of the committed tokens, in the order that they were drawn in.
WIDE_TREE = Draft(
    tuple(range(K)),
    (SparseDistribution(np.arange(17, dtype=np.uint32), np.ones(17, np.uint16)), *[None] * K),
    (0,) * K,
)
LAST_OF_WIDE = torch.eye(17, dtype=torch.float64)[16]


def asked(purpose: Purpose, indices: Sequence[int]) -> list[Asked]:
    return [Asked(SEED, ROUND, index, purpose) for index in indices]


def decided(rule: Rule, row: torch.Tensor, draft: Draft) -> tuple[Outcome, list[Asked]]:
    """The outcome on rows that are all the same, and what was asked for it."""
    with recording() as recorder:
        outcome = decide(rule, TableRows([row] * (K + 1)), draft, BASE, CounterNoise(SEED, ROUND))
    return outcome, recorder.by()


CERTAIN = torch.tensor([0.0, 1.0], dtype=torch.float64)
ALL = range(K)
RACES = [Asked(SEED, 0, BASE + i, Purpose.SHARED) for i in range(K + 1)]
#: Of each rule a round that asks for all that it can ask for: (rows, draft, accepted, what it draws).
WHOLE_ROUNDS: dict[str, tuple[Rule, torch.Tensor, Draft, int, list[Asked]]] = {
    "token, all accepted": (
        Rule.TOKEN, CERTAIN, CHAIN, K, [*asked(Purpose.ACCEPTANCE, ALL), *asked(Purpose.NEXT, [K])]
    ),
    "token, the first refused": (
        Rule.TOKEN, UNLIKELY, CHAIN, 0, [*asked(Purpose.ACCEPTANCE, [0]), *asked(Purpose.RESIDUAL, [0])]
    ),
    "block, all accepted": (
        Rule.BLOCK, CERTAIN, CHAIN, K, [*asked(Purpose.ACCEPTANCE, [K - 1]), *asked(Purpose.NEXT, [K])]
    ),
    "block, no test passes": (
        Rule.BLOCK, UNLIKELY, CHAIN, 0, [*asked(Purpose.ACCEPTANCE, ALL), *asked(Purpose.RESIDUAL, [0])]
    ),
    "top-m tree": (Rule.BLOCK, CERTAIN, CERTAIN_TREE, K, asked(Purpose.NEXT, range(K + 1))),
    "recursive tree, deep": (
        Rule.BLOCK, CERTAIN, DRAWN_TREE, K, [*asked(Purpose.ACCEPTANCE, ALL), *asked(Purpose.NEXT, [K])]
    ),
    "recursive tree, wide": (
        Rule.BLOCK, LAST_OF_WIDE, WIDE_TREE, 0,
        [*asked(Purpose.ACCEPTANCE, ALL), *asked(Purpose.RESIDUAL, [0])],
    ),
    "shared noise": (Rule.SHARED_NOISE, CERTAIN, CHAIN, K, RACES),
    "shared noise, tree": (Rule.SHARED_NOISE, CERTAIN, CERTAIN_TREE, K, RACES),
    "greedy": (Rule.GREEDY, CERTAIN, CHAIN, K, []),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE_ROUNDS)
def test_each_draw_of_the_target_has_the_stream_that_is_documented(name: str) -> None:
    rule, row, draft, num_accepted, expected = WHOLE_ROUNDS[name]
    outcome, found = decided(rule, row, draft)
    assert outcome.num_accepted == num_accepted
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("num_accepted", range(K))
def test_a_correction_has_the_stream_of_its_place(num_accepted: int) -> None:
    rows = TableRows([CERTAIN] * num_accepted + [UNLIKELY] * (K + 1 - num_accepted))
    for rule, draft, row in (
        (Rule.TOKEN, CHAIN, num_accepted),
        (Rule.BLOCK, CHAIN, num_accepted),
        (Rule.BLOCK, DRAWN_TREE, num_accepted),
    ):
        with recording() as recorder:
            outcome = decide(rule, rows, draft, BASE, CounterNoise(SEED, ROUND))
        assert outcome.num_accepted == num_accepted
        assert recorder.by()[-1] == Asked(SEED, ROUND, row, Purpose.RESIDUAL)
        assert len(set(recorder.by())) == len(recorder.by())


def uniform_model(prefix: Prefix, paths: tuple[Prefix, ...]) -> Rows:
    return TableRows([torch.full((20,), 0.05, dtype=torch.float64)] * len(paths))


@pytest.mark.parametrize("shape", ["chain", "16 deep", "4 by 4", "8 wide"])
def test_each_draw_of_a_draft_has_a_stream_of_its_own(shape: str) -> None:
    def grow(round_: Round, num_tokens: int) -> Growth:
        if shape == "chain":
            return chain(round_, num_tokens)
        depth, width = {"16 deep": (16, 1), "4 by 4": (4, 4), "8 wide": (2, 8)}[shape]
        return fixed_tree(round_, num_tokens, depth=depth, width=width)

    with recording() as recorder:
        draft = grown(grow, Rule.BLOCK)(DraftCounterNoise(SEED, ROUND), uniform_model, (), K)
    assert len(draft.token_ids) == K
    assert sorted(recorder.by()) == asked(Purpose.DRAFT, ALL)


def exact(propose: Propose, rule: Rule, places: tuple[int, ...], models: tuple[Model, Model]) -> None:
    length = max(places) + 1
    emitted = law.emitted_law(Implementation(propose, decide_by(rule)), *models, length, K)
    law.assert_exact(emitted, law.target_law(models[0], length))


@pytest.mark.parametrize("places", [(7, 8, 9), (0, 8, 15), (14, 15, 16)], ids=str)
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_the_law_of_chains(rule: Rule, places: tuple[int, ...]) -> None:
    exact(
        drafting.chain(drafting.drawn),
        rule,
        places,
        (tables.open_at(2, 3, places), tables.open_at(2, 4, places)),
    )


@pytest.mark.parametrize(
    "branch", [drafting.top_children, drafting.drawn_children(2)], ids=["certain", "drawn"]
)
@pytest.mark.parametrize("places", [(4, 5, 6), (13, 14, 15)], ids=str)
def test_the_law_of_deep_trees(branch: drafting.Branch, places: tuple[int, ...]) -> None:
    propose = tree(branch, *[1] * K)
    exact(propose, Rule.BLOCK, places, (tables.open_at(2, 3, places), tables.open_at(2, 4, places)))


def test_the_block_rule_where_its_scale_is_small() -> None:
    p, q = tables.small_scales()
    emitted = law.emitted_law(
        Implementation(drafting.chain(drafting.drawn), decide_by(Rule.BLOCK)), p, q, 3, 3
    )
    law.assert_exact(emitted, law.target_law(p, 3))
