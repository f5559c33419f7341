"""Under shared noise the text is that of plain decoding with the same seed, whatever is drafted.

The noise itself has the law that it should have, to the last bit of its 52.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from draft_worker.drawing import DraftCounterNoise, draw
from splitspec.sampling import randomness
from splitspec.sampling.randomness import CounterNoise
from splitspec.types import Rule, Sampling
from splitspec.wire import Draft
from tests.exactness import drafting, law, tables, wrong_trees
from tests.exactness.drafting import Propose, RoundNoise, chain, tree
from tests.exactness.enumeration import pieces
from tests.exactness.law import Decide, Implementation, decide_by
from tests.exactness.tables import Model, Prefix

LENGTH = 6


def raced(noise: RoundNoise, q: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
    """The draft worker's own step, at the position of each token."""
    tokens: Prefix = ()
    for i in range(num_draft_tokens):
        position = len(prefix) + i
        token, sent = draw(Rule.SHARED_NOISE, q(prefix, (tokens,)), 0, i, position, noise)
        assert sent is None
        tokens += (token,)
    return Draft.certain(tokens)


def garbage(noise: RoundNoise, q: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
    """A tree of any shape with any tokens."""
    generator = np.random.default_rng((num_draft_tokens, *prefix))
    edges: dict[tuple[int, int], None] = {}
    for _ in range(num_draft_tokens):
        edges[int(generator.integers(len(edges) + 1)), int(generator.integers(3))] = None
    return Draft.certain([token for _, token in edges], [parent for parent, _ in edges])


DRAFTERS: dict[str, Propose] = {
    "raced": raced,
    "certain": chain(drafting.certain),
    "drawn": chain(drafting.drawn),
    "certain tree": tree(drafting.top_children, 2, 2, 1),
    "drawn tree": tree(drafting.drawn_children(3), 2, 1, 1),
    "garbage": garbage,
}


def models(seed: int) -> tuple[Model, Model]:
    """Target and draft of 3 to 6 tokens; most with zeros, some processed with a history."""
    vocabulary_size = 3 + seed % 4
    if seed % 8:
        return tables.random_model(vocabulary_size, seed), tables.random_model(vocabulary_size, seed + 1)
    sampling = Sampling(temperature=0.9, top_k=3, frequency_penalty=0.5, seed=0)
    return (
        tables.processed_model(vocabulary_size, seed, sampling),
        tables.processed_model(vocabulary_size, seed + 1, sampling),
    )


def plain_text(p: Model, seed: int) -> Prefix:
    """Token by token, each the winner at its position."""
    tokens: Prefix = ()
    for position in range(LENGTH):
        row = p(tokens, ((),)).probabilities(0)
        tokens += (CounterNoise(seed, 1).race(position, row),)
    return tokens


def text(propose: Propose, decide: Decide, p: Model, q: Model, seed: int, num_draft_tokens: int) -> Prefix:
    rounds = map(lambda number: DraftCounterNoise(seed, number), itertools.count(1))
    return law.session(Implementation(propose, decide), p, q, LENGTH, num_draft_tokens, rounds)


def assert_same_text(propose: Propose, decide: Decide, num_draft_tokens: int, seeds: range) -> None:
    """What the right rule passes for every drafter, and every wrong one fails."""
    for seed in seeds:
        p, q = models(seed)
        assert text(propose, decide, p, q, seed, num_draft_tokens) == plain_text(p, seed), seed


#: The trees have a depth of up to 3.
CASES = [
    *itertools.product(["raced", "certain", "drawn", "garbage"], [0, 1, 2, 3, 4]),
    *itertools.product(["certain tree", "drawn tree"], [1, 2, 3]),
]


@pytest.mark.parametrize(("drafter", "num_draft_tokens"), CASES)
def test_text_is_that_of_plain_decoding(drafter: str, num_draft_tokens: int) -> None:
    """For 100 tables and seeds each, 2,600 in all."""
    first = 100 * CASES.index((drafter, num_draft_tokens))
    seeds = range(first, first + 100)
    assert_same_text(DRAFTERS[drafter], decide_by(Rule.SHARED_NOISE), num_draft_tokens, seeds)


WRONG: dict[str, tuple[Propose, Decide]] = {
    "keyed by round": (raced, wrong_trees.race_by_round),
    "keyed by node": (DRAFTERS["certain tree"], wrong_trees.race_by_node),
    "the token rule on raced tokens": (raced, decide_by(Rule.TOKEN)),
}


@pytest.mark.parametrize("name", WRONG)
def test_rejects_text_that_depends_on_the_draft(name: str) -> None:
    with pytest.raises(AssertionError):
        assert_same_text(*WRONG[name], 3, range(50))


def agreement(p: list[float], q: list[float]) -> float:
    """P(both races have the same winner): sum over i of 1 / sum_j max(p_j / p_i, q_j / q_i).

    Token i wins both if e_j is above e_i max(p_j / p_i, q_j / q_i) for each j; then integrate over e_i.
    """
    return math.fsum(
        1 / math.fsum(max(pj / pi, qj / qi) for pj, qj in zip(p, q, strict=True))
        for pi, qi in zip(p, q, strict=True)
        if pi and qi
    )


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_is_at_least_what_the_paper_promises(seed: int) -> None:
    """(1 - TV) / (1 + TV) for each pair of rows; and 10,000 races agree as often as theory says."""
    for other in range(100):
        p, q = (tables.random_table(5, 1000 * seed + 2 * other + side)(()) for side in (0, 1))
        distance = float((p - q).abs().sum()) / 2
        assert agreement(p.tolist(), q.tolist()) >= (1 - distance) / (1 + distance) - 1e-12
    p, q = (tables.random_table(5, seed + side)((0,)) for side in (0, 1))
    expected = agreement(p.tolist(), q.tolist())
    noise, count = CounterNoise(seed, 1), 10_000
    found = sum(noise.race(position, p) == noise.race(position, q) for position in range(count)) / count
    # Four standard deviations: seeds are fixed, so never by chance.
    assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


Race = Callable[[np.ndarray, np.ndarray], int]
#: Words of the other token: early, usual and late, and both ends.
OTHERS = [2**64 - 1, 2**64 - 2**44, 2**63, 2**40, 0]


def assert_exponential(race: Race) -> None:
    """Against another that arrives at time t, a token of rate w wins with probability 1 - exp(-w t).

    Its share of the 2**52 values of U, by bisection, is off by at most one: for a token of probability 1e-9
    that is a relative error below 1e-6.
    """
    for rate in (1e-12, 1e-9, 1e-3, 0.5, 1.0, 30.0):
        for other in OTHERS:
            # Both at their place in the order, since ties go to the lowest id.
            time = -math.log(((other >> 12) + 0.5) / 2**52)
            for place in (0, 1):
                weights = np.array([rate, 1.0] if place == 0 else [1.0, rate])

                def wins(
                    raw: int, place: int = place, other: int = other, weights: np.ndarray = weights
                ) -> int:
                    words = np.array([raw, other] if place == 0 else [other, raw], np.uint64)
                    return int(race(words, weights) == place)

                share = sum(piece.end - piece.start for piece in pieces(wins) if piece.result) / 2**64
                assert abs(share + math.expm1(-rate * time)) <= 2.0**-52


def test_noise_is_exponential_in_both_tails() -> None:
    assert_exponential(randomness.race)


def test_a_rare_token_wins_as_often_as_it_should() -> None:
    """Of probability 1e-9, against the rest: the share of its own values, for 200 arrivals of the rest."""
    weights = np.array([1 - 1e-9, 1e-9])
    for k in range(200):
        rest = int((k + 0.5) / 200 * 2**64)
        time = -math.log(((rest >> 12) + 0.5) / 2**52) / weights[0]
        cut = pieces(lambda raw, rest=rest: randomness.race(np.array([rest, raw], np.uint64), weights))  # type: ignore[misc]
        share = sum(piece.end - piece.start for piece in cut if piece.result == 1) / 2**64
        assert share == pytest.approx(-math.expm1(-1e-9 * time), rel=1e-6, abs=2.0**-52)


def test_rejects_noise_of_too_few_bits() -> None:
    with pytest.raises(AssertionError):
        assert_exponential(wrong_trees.race_of_float32)
