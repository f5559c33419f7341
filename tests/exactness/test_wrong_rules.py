"""The suite rejects what only looks right, by the assertions that accept the right implementation."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import pytest

from splitspec.sampling import randomness
from splitspec.types import MAX_NUM_DRAFT_TOKENS, Rule, Sampling
from tests.exactness import drafting, law, tables, wrong, wrong_trees
from tests.exactness.drafting import Branch, Propose, Step, chain, tree
from tests.exactness.enumeration import Primitives
from tests.exactness.law import Decide, Implementation, Law, decide_by
from tests.exactness.tables import Model

Tables = tuple[Model, Model]

PLAIN = Sampling(temperature=0.7)
PENALISED = Sampling(temperature=0.7, repetition_penalty=1.5, frequency_penalty=0.8, presence_penalty=0.5)
NO_ZEROS: Tables = (
    tables.processed_model(3, 8, PLAIN),
    tables.processed_model(3, 9, Sampling(temperature=1.5)),
)
WITH_PENALTIES: Tables = (
    tables.processed_model(3, 8, PENALISED, prompt=(1,)),
    tables.processed_model(3, 9, PENALISED, prompt=(1,)),
)
ENDING_LATE: Tables = (
    tables.processed_model(3, 8, PLAIN, min_tokens=2, ending=frozenset([1])),
    tables.processed_model(3, 9, PLAIN, min_tokens=2, ending=frozenset([1])),
)
#: Where mistakes in the block rule show more than elsewhere.
FOR_BLOCKS: Tables = (tables.processed_model(3, 114, PLAIN), tables.processed_model(3, 115, Sampling()))
TWO_TOKENS: Tables = (tables.processed_model(2, 106, PLAIN), tables.processed_model(2, 107, Sampling()))
DISJOINT: Tables = (tables.random_model(4, 4, allowed=[0, 2]), tables.random_model(4, 5, allowed=[1, 3]))

TOKEN = Implementation(wrong.right, decide_by(Rule.TOKEN))
BLOCK = Implementation(wrong.right, decide_by(Rule.BLOCK))
DRAWN_TREE = Implementation(tree(drafting.drawn_children(3), 2, 1), decide_by(Rule.BLOCK))
CERTAIN_TREE = Implementation(tree(drafting.top_children, 2, 1), decide_by(Rule.BLOCK))
DEEP_TREE = Implementation(tree(drafting.top_children, *[1] * MAX_NUM_DRAFT_TOKENS), decide_by(Rule.BLOCK))
DEEP_DRAWN_TREE = replace(DEEP_TREE, propose=tree(drafting.drawn_children(2), *[1] * MAX_NUM_DRAFT_TOKENS))


@dataclass(frozen=True)
class Wrong:
    """A wrong implementation, the right one that it differs from, and where the mistake shows.

    least: total variation from the target that it has at least.
    """

    implementation: Implementation
    right: Implementation
    models: Tables = NO_ZEROS
    least: float = 1e-3
    length: int = 3
    across_rounds: bool = False
    num_draft_tokens: int = 2


def token(decide: Decide) -> Wrong:
    return Wrong(replace(TOKEN, decide=decide), TOKEN)


def drafted(propose: Propose) -> Wrong:
    return Wrong(replace(TOKEN, propose=propose), TOKEN)


def step(made: Step) -> Wrong:
    return drafted(chain(made))


def block(
    decide: Decide, models: Tables = FOR_BLOCKS, across_rounds: bool = False, least: float = 1e-3
) -> Wrong:
    return Wrong(replace(BLOCK, decide=decide), BLOCK, models, least, across_rounds=across_rounds)


def late(decide: Decide, right: Implementation, places: tuple[int, ...], least: float = 1e-3) -> Wrong:
    """A mistake that shows at these places of a proposal of 16 tokens, which are the only open ones."""
    models = tables.open_at(2, 3, places), tables.open_at(2, 4, places)
    wrongly = replace(right, decide=decide)
    return Wrong(wrongly, right, models, least, max(places) + 1, num_draft_tokens=MAX_NUM_DRAFT_TOKENS)


def children(branch: Branch) -> Wrong:
    return Wrong(replace(DRAWN_TREE, propose=tree(branch, 2, 1)), DRAWN_TREE, length=2)


def drawn_tree(decide: Decide) -> Wrong:
    return Wrong(replace(DRAWN_TREE, decide=decide), DRAWN_TREE, length=2)


def rows(read: law.ReadRows, models: Tables = WITH_PENALTIES) -> Wrong:
    return Wrong(replace(BLOCK, rows=read), BLOCK, models)


BIASED = {
    "quantised after the draw": step(wrong.coarse_after_the_draw),
    "truncated after the draw": Wrong(
        replace(TOKEN, propose=chain(wrong.top_after_the_draw), relay=wrong.unchecked), TOKEN
    ),
    "argmax verified with softmax": step(wrong.argmax_sent_as_drawn),
    "one draw for the chain": step(wrong.one_draw_for_the_chain),
    "unlikely token dropped": drafted(wrong.drop_unlikely),
    "24-bit draft draw": Wrong(
        replace(TOKEN, primitives=Primitives(randomness.accepts, wrong.below_by_24_bits)), TOKEN, least=1e-9
    ),
    "stale distributions": Wrong(
        replace(TOKEN, relay=wrong.stale_distributions), TOKEN, TWO_TOKENS, across_rounds=True
    ),
    "residual is p": token(wrong.correcting(wrong.from_p)),
    "residual is |p - q|": token(wrong.correcting(wrong.from_the_difference)),
    "residual of the next row": token(wrong.correcting(wrong.from_the_next_row)),
    "acceptance uniform draws the residual": token(wrong.correcting(wrong.with_the_acceptance_uniform)),
    "one-hot without its residual": token(wrong.lost_without_fallback),
    "ratio inverted": Wrong(
        replace(TOKEN, primitives=Primitives(wrong.accepts_inverted, randomness.below)), TOKEN
    ),
    "one uniform for all positions": token(wrong.one_uniform(Rule.TOKEN)),
    "bonus from the row before": token(wrong.bonus_from_the_last_draft_row),
    "rows shifted": token(wrong.every_row_one_late),
    "block: one uniform for all positions": block(wrong.one_uniform(Rule.BLOCK)),
    "block: stops at the first failing test": block(wrong.block(early_stop=True)),
    "block: the token rule's residual": block(wrong.block(ordinary_residual=True)),
    "block: tests P_i instead of h_i": block(wrong.block(ordinary_test=True)),
    "block: noise keyed by position": block(wrong.by_position(Rule.BLOCK), TWO_TOKENS, across_rounds=True),
    "block: stale distributions": Wrong(
        replace(BLOCK, relay=wrong.stale_distributions), BLOCK, TWO_TOKENS, across_rounds=True
    ),
    "token: one uniform from token 8 on": late(wrong.one_uniform(Rule.TOKEN, last=7), TOKEN, (7, 8)),
    "block: one uniform from the ninth test on": late(
        wrong.one_uniform(Rule.BLOCK, last=8), BLOCK, (8, 9, 10)
    ),
    "block: the residual's scale is at least 0.001": block(
        wrong.block(least_scale=1e-3), tables.small_scales(), least=1e-7
    ),
    "top-m tree: rows from the fifth on share noise": late(
        wrong.one_uniform(Rule.BLOCK, last_drawn=4), DEEP_TREE, (4, 5)
    ),
    "recursive tree: one uniform from node 12 on": late(
        wrong.one_uniform(Rule.BLOCK, last=12), DEEP_DRAWN_TREE, (12, 13)
    ),
    "penalties frozen over the block": rows(wrong.frozen_history),
    "minimum length frozen over the block": rows(wrong.frozen_history, ENDING_LATE),
    "bonus row unprocessed": rows(wrong.bonus_unprocessed),
    "only the bonus row processed": rows(wrong.only_the_bonus_processed),
    "tree: a drawn sibling removed": children(wrong_trees.sibling_removed),
    "tree: argmax children sent as drawn": children(wrong_trees.top_sent_as_drawn),
    "tree: drawn with replacement": children(wrong_trees.drawn_with_replacement),
    "tree: q not renormalised": drawn_tree(wrong_trees.recursive(renormalised=False)),
    "tree: q keeps the sibling": drawn_tree(wrong_trees.recursive(q_updated=False)),
    "tree: p kept after a rejection": drawn_tree(wrong_trees.recursive(p_updated=False)),
    "tree: siblings in order of q": drawn_tree(wrong_trees.recursive(by_probability=True)),
    "tree: certain siblings accepted independently": Wrong(
        replace(CERTAIN_TREE, decide=wrong_trees.siblings_tried_independently), CERTAIN_TREE
    ),
}


@functools.cache
def law_of(
    implementation: Implementation, models: Tables, length: int, across_rounds: bool, num_draft_tokens: int
) -> Law:
    """In one enumeration for all rounds where the mistake is between rounds."""
    emitted = law.session_law if across_rounds else law.emitted_law
    return emitted(implementation, *models, length, num_draft_tokens)


@pytest.mark.parametrize("name", BIASED)
def test_rejects_a_biased_implementation(name: str) -> None:
    case = BIASED[name]
    target = law.target_law(case.models[0], case.length)
    setting = (case.models, case.length, case.across_rounds, case.num_draft_tokens)
    law.assert_exact(law_of(case.right, *setting), target)
    emitted = law_of(case.implementation, *setting)
    assert math.fsum(emitted.values()) == pytest.approx(1, abs=law.TOLERANCE)
    assert law.total_variation(emitted, target) > case.least
    with pytest.raises(AssertionError):
        law.assert_exact(emitted, target)


@pytest.mark.parametrize("right", [TOKEN, BLOCK, DRAWN_TREE], ids=["token", "block", "tree"])
def test_rejects_an_acceptance_that_is_not_strict(right: Implementation) -> None:
    """Biased by no more than rounding, but it emits what the target never does."""
    target = law.target_law(DISJOINT[0], 1)
    law.assert_exact(law.emitted_law(right, *DISJOINT, 1, 1), target)
    at_most = replace(right, primitives=Primitives(wrong.accepts_at_most, randomness.below))
    emitted = law.emitted_law(at_most, *DISJOINT, 1, 1)
    never = law.impossible(emitted, target)
    assert 0 < math.fsum(emitted[tokens] for tokens in never) <= 2.0**-52
    with pytest.raises(AssertionError):
        law.assert_exact(emitted, target)


def test_the_token_rule_may_be_keyed_by_position() -> None:
    """It asks for nothing behind the first rejection: what fails under such keys is the block rule."""
    by_position = replace(TOKEN, decide=wrong.by_position(Rule.TOKEN))
    law.assert_exact(law.session_law(by_position, *TWO_TOKENS, 3, 2), law.target_law(TWO_TOKENS[0], 3))
