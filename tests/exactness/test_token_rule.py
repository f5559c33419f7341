"""How many tokens the token rule accepts, and its edges; its law is in test_chain_rules.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from splitspec.types import Rule
from splitspec.verification.residual import positive_part, residual
from splitspec.wire import SparseDistribution
from tests.exactness import drafting, law, tables
from tests.exactness.drafting import chain, top
from tests.exactness.law import TOLERANCE, Implementation, decide_by


def test_acceptance_rate_is_the_overlap_of_p_and_q() -> None:
    """P(first token accepted) = sum of min(p, q), with the q that was sent."""
    p, q = tables.random_table(6, seed=20), tables.random_table(6, seed=21)
    for size in (1, 3, 6):
        implementation = Implementation(chain(drafting.drawn_from_top(size)), decide_by(Rule.TOKEN))
        for prefix in [(), *((token,) for token in range(6))]:
            outcomes = law.round_law(implementation, tables.model(p), tables.model(q), prefix, 1)
            accepted = math.fsum(mass for (_, outcome), mass in outcomes.items() if outcome.num_accepted)
            sent = top(q(prefix), size)
            overlap = sum(min(float(p(prefix)[token]), sent.probability(token)) for token in range(6))
            assert accepted == pytest.approx(overlap, abs=TOLERANCE)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_mean_acceptance_length(num_draft_tokens: int) -> None:
    """(1 - a**(K+1)) / (1 - a) for rows that don't depend on the prefix (2211.17192, equation 1)."""
    p, q = tables.random_table(4, seed=22)((0,)), tables.random_table(4, seed=23)((1,))
    implementation = Implementation(chain(drafting.drawn), decide_by(Rule.TOKEN))
    outcomes = law.round_law(
        implementation, tables.model(lambda _: p), tables.model(lambda _: q), (), num_draft_tokens
    )
    mean = math.fsum(len(tokens) * mass for (tokens, _), mass in outcomes.items())
    a = sum(min(float(p[token]), top(q, 4).probability(token)) for token in range(4))
    assert 0.1 < a < 0.9
    assert mean == pytest.approx((1 - a ** (num_draft_tokens + 1)) / (1 - a), abs=TOLERANCE)


def test_residual_is_the_positive_part_on_the_support_of_q() -> None:
    p = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    q = SparseDistribution(np.array([2, 1], np.uint32), np.array([1, 1], np.uint16))
    assert residual(p, q).tolist() == [0.1, 0, 0, 0.2]
    assert p.tolist() == [0.1, 0.4, 0.3, 0.2]


def test_residual_without_mass_is_p() -> None:
    p = torch.tensor([0, 0.5, 0.5], dtype=torch.float64)
    q = SparseDistribution(np.array([1, 2], np.uint32), np.array([7, 7], np.uint16))
    assert not positive_part(p, q).any()
    assert residual(p, q).tolist() == p.tolist()
