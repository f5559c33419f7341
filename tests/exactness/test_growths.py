"""What the EAGLE drafter grows emits the target's law: its chains and trees, in its own vocabulary."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import cast

import pytest

from draft_worker.drawing import DraftCounterNoise
from draft_worker.eagle.trees import Growth, Round, chain, dynamic_tree, fixed_tree
from splitspec.engine.scheduler import run_alone
from splitspec.types import Rule, Sampling
from splitspec.verification.rules import rule_for
from splitspec.wire import Draft
from tests.draft_worker import eagles
from tests.drawings import drawing_of
from tests.exactness import law, tables
from tests.exactness.drafting import Propose, RoundNoise
from tests.exactness.law import Implementation, decide_by
from tests.exactness.tables import Model, Prefix

Grow = Callable[[Round, int], Growth]
GROWTHS: dict[str, Grow] = {
    "chain": chain,
    "fixed, wide": functools.partial(fixed_tree, depth=2, width=3),
    "fixed, deep": functools.partial(fixed_tree, depth=3, width=2),
    "dynamic, wide": functools.partial(dynamic_tree, depth=2, width=3),
    "dynamic, deep": functools.partial(dynamic_tree, depth=3, width=2),
}
PROCESSED = Sampling(temperature=0.7, top_k=3, top_p=0.9)
TABLES: dict[str, tuple[Model, Model]] = {
    "random": (tables.random_model(3, 1), tables.random_model(3, 2)),
    "equal": (tables.random_model(3, 3), tables.random_model(3, 3)),
    "disjoint": (tables.random_model(4, 4, allowed=[0, 2]), tables.random_model(4, 5, allowed=[1, 3])),
    "processed": (tables.processed_model(4, 6, PROCESSED), tables.processed_model(4, 7, PROCESSED)),
    "no zeros": (tables.processed_model(3, 8, Sampling()), tables.processed_model(3, 9, Sampling())),
}


def grown(grow: Grow, rule: Rule) -> Propose:
    """A growth on rows of a table."""

    def propose(noise: RoundNoise, q: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
        growth = grow(Round(rule, len(prefix), noise), num_draft_tokens)
        paths = next(growth)
        while True:
            try:
                paths = growth.send(q(prefix, tuple(paths)))
            except StopIteration as end:
                draft: Draft = end.value
                return draft

    return propose


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("pair", TABLES)
def test_the_law_of_tokens_is_the_targets(pair: str, growth: str, num_draft_tokens: int) -> None:
    p, q = TABLES[pair]
    implementation = Implementation(grown(GROWTHS[growth], Rule.BLOCK), decide_by(Rule.BLOCK))
    length = 3 if num_draft_tokens < 4 else 2
    law.assert_exact(
        law.emitted_law(implementation, p, q, length, num_draft_tokens), law.target_law(p, length)
    )


@pytest.mark.parametrize("growth", ["fixed, deep", "dynamic, deep"])
def test_all_rounds_in_one_enumeration(growth: str) -> None:
    p, q = TABLES["random"]
    implementation = Implementation(grown(GROWTHS[growth], Rule.TOKEN), decide_by(Rule.TOKEN))
    law.assert_exact(law.session_law(implementation, p, q, 3, 3), law.target_law(p, 3))


@pytest.mark.parametrize("growth", GROWTHS)
def test_the_rule_that_a_growth_is_verified_by(growth: str) -> None:
    expected = {"chain": Rule.BLOCK, "fixed": Rule.TREE_RECURSIVE, "dynamic": Rule.TREE_TOP_M}
    noise = DraftCounterNoise(1, 1)
    draft = grown(GROWTHS[growth], Rule.BLOCK)(noise, TABLES["no zeros"][1], (), 4)
    assert rule_for(Rule.BLOCK, draft) is expected[growth.split(",")[0]]
    for rule in (Rule.GREEDY, Rule.SHARED_NOISE):
        assert not any(grown(GROWTHS[growth], rule)(noise, TABLES["no zeros"][1], (), 4).distributions)


def nothing(noise: RoundNoise, q: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
    return Draft.certain(())


def text(propose: Propose, p: Model, q: Model, seed: int) -> Prefix:
    implementation = Implementation(propose, decide_by(Rule.SHARED_NOISE))
    rounds = map(functools.partial(DraftCounterNoise, seed), itertools.count(1))
    return law.session(implementation, p, q, 6, 3, rounds)


#: Accepted of three nodes at least, when the draft's rows are the target's.
SURELY = {"chain": 3, "fixed, wide": 2, "fixed, deep": 2, "dynamic, wide": 1, "dynamic, deep": 1}


@pytest.mark.parametrize("growth", GROWTHS)
def test_text_under_shared_noise_is_that_of_plain_decoding(growth: str) -> None:
    """And the first child of each row is the race's winner."""
    propose = grown(GROWTHS[growth], Rule.SHARED_NOISE)
    implementation = Implementation(propose, decide_by(Rule.SHARED_NOISE))
    for seed in range(60):
        p, q = tables.random_model(4, 2 * seed), tables.random_model(4, 2 * seed + 1)
        assert text(propose, p, q, seed) == text(nothing, p, q, seed)
        _, outcome = implementation.round(DraftCounterNoise(seed, 1), p, p, (), 3, [])
        assert outcome.num_accepted >= SURELY[growth]


@pytest.mark.parametrize("growth", GROWTHS)
def test_the_drafter_itself(growth: str) -> None:
    """A random network over five of seven ids, whose rows come from pages, joined with the growths."""
    drafter = eagles.small_drafter(GROWTHS[growth], vocabulary_size=7, ids=[0, 2, 3, 5, 6])
    prompt = (1, 4, 2)
    drawing = drawing_of(Sampling(temperature=0.9, top_k=2))

    def propose(noise: RoundNoise, _: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
        tokens = prompt + prefix
        state = drafter.open()
        drafter.take_features(state, 0, eagles.features(tokens)[:-1])
        noise = cast(DraftCounterNoise, noise)  # one that forks is asked for no seed
        return run_alone(drafter.propose(state, tokens, num_draft_tokens, drawing, noise))

    p = tables.random_model(7, 5)
    implementation = Implementation(propose, decide_by(Rule.BLOCK))
    law.assert_exact(law.emitted_law(implementation, p, p, 2, 3), law.target_law(p, 2))
