"""The block rule accepts what its paper promises; its law is in test_chain_rules.py."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from splitspec.sampling.randomness import CounterNoise
from splitspec.types import Rule, Sampling
from splitspec.verification.block import verify_block
from splitspec.verification.outcome import Outcome
from splitspec.wire import Draft, SparseDistribution
from tests.exactness import drafting, law, tables
from tests.exactness.drafting import chain, top
from tests.exactness.law import TOLERANCE, Implementation, decide_by
from tests.exactness.tables import Model, TableRows


def mean_accepted(rule: Rule, p: Model, q: Model, num_draft_tokens: int) -> float:
    implementation = Implementation(chain(drafting.drawn), decide_by(rule))
    outcomes = law.round_law(implementation, p, q, (), num_draft_tokens)
    return math.fsum(outcome.num_accepted * mass for (_, outcome), mass in outcomes.items())


def models(seed: int) -> tuple[Model, Model]:
    """Some with tokens of probability 0, some without."""
    if seed % 2:
        return tables.random_model(3, 2 * seed), tables.random_model(3, 2 * seed + 1)
    return (
        tables.processed_model(3, 2 * seed, Sampling(temperature=0.7)),
        tables.processed_model(3, 2 * seed + 1, Sampling()),
    )


@pytest.mark.parametrize("num_draft_tokens", [2, 3])
def test_accepts_at_least_as_many_as_the_token_rule(num_draft_tokens: int) -> None:
    """On every table, as the paper proves, and on many of them more."""
    more = 0
    for seed in range(24):
        token, block = (
            mean_accepted(rule, *models(seed), num_draft_tokens) for rule in (Rule.TOKEN, Rule.BLOCK)
        )
        assert block > token - TOLERANCE
        more += block > token + 1e-6
    assert more > 12


@pytest.mark.parametrize("seed", range(20))
def test_is_the_token_rule_for_one_draft_token(seed: int) -> None:
    p, q = models(seed)
    laws = [
        law.round_law(Implementation(chain(drafting.drawn), decide_by(rule)), p, q, (), 1)
        for rule in (Rule.TOKEN, Rule.BLOCK)
    ]
    assert laws[0].keys() == laws[1].keys()
    assert all(laws[0][result] == pytest.approx(laws[1][result], abs=TOLERANCE) for result in laws[0])


@pytest.mark.parametrize("seed", range(6))
def test_accepts_a_prefix_with_the_probability_that_the_test_is_built_for(seed: int) -> None:
    """P(the first i tokens are drafted and accepted) = q(x_1..i) P_i: the lemma that the rule rests on."""
    p, q = models(seed)
    outcomes = law.round_law(Implementation(chain(drafting.drawn), decide_by(Rule.BLOCK)), p, q, (), 3)
    for length in (1, 2, 3):
        for tokens in itertools.product(range(3), repeat=length):
            expected = scale = 1.0
            for i, token in enumerate(tokens):
                drawn = top(q(tokens[:i], ((),)).probabilities(0), 3).probability(token)
                expected *= drawn
                if drawn:
                    scale = min(1.0, scale * float(p(tokens[:i], ((),)).probabilities(0)[token]) / drawn)
            found = math.fsum(
                mass
                for (committed, outcome), mass in outcomes.items()
                if outcome.num_accepted >= length and committed[:length] == tokens
            )
            assert found == pytest.approx(expected * scale, abs=TOLERANCE)


def test_accepts_all_of_a_draft_that_is_the_target() -> None:
    """Every residual is empty and every P_i is 1, so that the last test decides."""
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    q = SparseDistribution(np.array([0, 1], np.uint32), np.array([1, 1], np.uint16))
    for seed in range(20):
        outcome = verify_block(TableRows([half] * 4), Draft((0, 1, 0), (q, q, q)), CounterNoise(seed, 1))
        assert outcome == Outcome.of_chain(3, 3, outcome.next_token)


def test_a_test_of_0_by_0_passes() -> None:
    """It decides only where rounding makes the last test fail, which is 1 for such a draft."""

    class LastRefused(CounterNoise):
        def accepts(self, index: int, numerator: float, denominator: float) -> bool:
            return index < 1 and super().accepts(index, numerator, denominator)

    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    q = SparseDistribution(np.array([0, 1], np.uint32), np.array([1, 1], np.uint16))
    outcome = verify_block(TableRows([half] * 3), Draft((0, 1), (q, q)), LastRefused(1, 1))
    assert outcome == Outcome.of_chain(2, 1, outcome.next_token)
