"""The token rule with every kind of draft emits the target's joint law, to floating point."""

from __future__ import annotations

import math

import pytest
import torch

from splitspec.sampling import randomness
from splitspec.sampling.randomness import CounterNoise, Purpose
from splitspec.types import Sampling
from splitspec.wire import Draft, SparseDistribution
from tests.exactness import law, wrong
from tests.exactness.law import BranchingNoise, Implementation, Prefix, Propose, Step, Table

TOLERANCE = 1e-12


def drawn_from_top(size: int) -> Step:
    """Truncate and quantise first, then draw, and send what was drawn from."""

    def step(noise: BranchingNoise, index: int, row: torch.Tensor) -> tuple[int, SparseDistribution | None]:
        q = law.top(row, size)
        return noise.draft_token(index, q), q

    return step


def certain(noise: BranchingNoise, index: int, row: torch.Tensor) -> tuple[int, None]:
    return int(torch.argmax(row)), None


def lost(noise: BranchingNoise, index: int, row: torch.Tensor) -> tuple[int, None]:
    """Drawn from q, but q doesn't arrive."""
    return drawn_from_top(len(row))(noise, index, row)[0], None


def mixed(noise: BranchingNoise, index: int, row: torch.Tensor) -> tuple[int, SparseDistribution | None]:
    return (lost if index % 2 else drawn_from_top(len(row)))(noise, index, row)


def up_to_unlikely(noise: BranchingNoise, q: Table, prefix: Prefix, num_draft_tokens: int) -> Draft:
    """End the chain at the first token of low q, which is kept."""
    draft = law.chain(drawn_from_top(6))(noise, q, prefix, num_draft_tokens)
    for i, (token, row) in enumerate(zip(draft.token_ids, draft.distributions, strict=True)):
        if row is not None and row.probability(token) < 0.4:
            return Draft(draft.token_ids[: i + 1], draft.distributions[: i + 1])
    return draft


DRAFTERS: dict[str, Propose] = {
    "full": law.chain(drawn_from_top(6)),
    "top2": law.chain(drawn_from_top(2)),
    "top1": law.chain(drawn_from_top(1)),
    "certain": law.chain(certain),
    "lost": law.chain(lost),
    # A token outside of what was sent counts as one-hot; of one inside, what was sent is the law.
    "sent without the drawn token": law.chain(wrong.top_after_the_draw),
    "mixed": law.chain(mixed),
    "up to unlikely": up_to_unlikely,
}
SAMPLING = Sampling(temperature=0.7, top_k=3, top_p=0.9)
#: Pairs of target and draft.
TABLES: dict[str, tuple[Table, Table]] = {
    "random": (law.random_table(3, seed=1), law.random_table(3, seed=2)),
    "equal": (law.random_table(3, seed=3), law.random_table(3, seed=3)),
    "disjoint": (law.random_table(4, seed=4, allowed=[0, 2]), law.random_table(4, seed=5, allowed=[1, 3])),
    "processed": (
        law.processed_table(4, seed=6, sampling=SAMPLING),
        law.processed_table(4, seed=7, sampling=SAMPLING),
    ),
    "no zeros": (
        law.processed_table(3, seed=8, sampling=Sampling(temperature=0.7)),
        law.processed_table(3, seed=9, sampling=Sampling(temperature=1.5)),
    ),
    "six tokens": (law.random_table(6, seed=10), law.random_table(6, seed=11)),
}


def assert_exact(
    implementation: Implementation, p: Table, q: Table, length: int, num_draft_tokens: int
) -> None:
    emitted = law.emitted_law(implementation, p, q, length, num_draft_tokens)
    target = law.target_law(p, length)
    assert not law.impossible(emitted, target)
    assert math.fsum(emitted.values()) == pytest.approx(1, abs=TOLERANCE)
    assert law.total_variation(emitted, target) < TOLERANCE


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tables", ["random", "equal", "disjoint", "processed"])
def test_three_tokens(tables: str, drafter: str, num_draft_tokens: int) -> None:
    assert_exact(Implementation(DRAFTERS[drafter]), *TABLES[tables], 3, num_draft_tokens)


@pytest.mark.parametrize(("length", "num_draft_tokens"), [(3, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tables", ["no zeros", "six tokens"])
def test_tables_with_more_outcomes(tables: str, drafter: str, length: int, num_draft_tokens: int) -> None:
    assert_exact(Implementation(DRAFTERS[drafter]), *TABLES[tables], length, num_draft_tokens)


@pytest.mark.parametrize("name", wrong.BIASED)
def test_rejects_a_biased_implementation(name: str) -> None:
    p, q = TABLES["no zeros"]
    emitted = law.emitted_law(wrong.BIASED[name], p, q, 3, num_draft_tokens=2)
    assert math.fsum(emitted.values()) == pytest.approx(1, abs=TOLERANCE)
    assert law.total_variation(emitted, law.target_law(p, 3)) > 1e-3
    with pytest.raises(AssertionError):
        assert_exact(wrong.BIASED[name], p, q, 3, num_draft_tokens=2)


def test_rejects_an_acceptance_that_is_not_strict() -> None:
    p, q = TABLES["disjoint"]
    emitted = law.emitted_law(wrong.NOT_STRICT, p, q, 1, num_draft_tokens=1)
    never = law.impossible(emitted, law.target_law(p, 1))
    assert math.fsum(emitted[tokens] for tokens in never) == 2.0**-53
    with pytest.raises(AssertionError):
        assert_exact(wrong.NOT_STRICT, p, q, 1, num_draft_tokens=1)


def test_acceptance_rate_is_the_overlap_of_p_and_q() -> None:
    """P(first token accepted) = sum of min(p, q), with the q that was sent."""
    p, q = law.random_table(6, seed=20), law.random_table(6, seed=21)
    for size in (1, 3, 6):
        for prefix in [(), *((token,) for token in range(6))]:
            outcomes = law.round_law(Implementation(law.chain(drawn_from_top(size))), p, q, prefix, 1)
            accepted = math.fsum(mass for (_, outcome), mass in outcomes.items() if outcome.num_accepted)
            sent = law.top(q(prefix), size)
            overlap = sum(min(float(p(prefix)[token]), sent.probability(token)) for token in range(6))
            assert accepted == pytest.approx(overlap, abs=TOLERANCE)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_mean_acceptance_length(num_draft_tokens: int) -> None:
    """(1 - a**(K+1)) / (1 - a) for rows that don't depend on the prefix (2211.17192, equation 1)."""
    p, q = law.random_table(4, seed=22)((0,)), law.random_table(4, seed=23)((1,))
    outcomes = law.round_law(
        Implementation(law.chain(drawn_from_top(4))), lambda _: p, lambda _: q, (), num_draft_tokens
    )
    mean = math.fsum(len(tokens) * mass for (tokens, _), mass in outcomes.items())
    a = sum(min(float(p[token]), law.top(q, 4).probability(token)) for token in range(4))
    assert 0.1 < a < 0.9
    assert mean == pytest.approx((1 - a ** (num_draft_tokens + 1)) / (1 - a), abs=TOLERANCE)


def test_enumeration_agrees_with_the_counter_noise() -> None:
    """The branch that the suite measures for a raw integer is the one that the service takes."""
    weights = law.random_table(6, seed=30)(())
    q = law.top(law.random_table(6, seed=31)(()), 6)
    accepting = law.pieces(lambda raw: int(randomness.accepts(randomness.unit(raw), 0.3, 0.7)), law.ALL)
    drawing = law.pieces(lambda raw: randomness.invert(randomness.unit(raw), weights), law.ALL)
    drafting = law.pieces(lambda raw: q.token_at(randomness.below(raw, q.total)), law.ALL)
    for seed in range(1000):
        noise = CounterNoise(seed, 1)
        for purpose, pieces, taken in [
            (Purpose.ACCEPTANCE, accepting, int(noise.accepts(0, 0.3, 0.7))),
            (Purpose.NEXT, drawing, noise.draw(0, Purpose.NEXT, weights)),
            (Purpose.DRAFT, drafting, q.token_at(noise.below(0, Purpose.DRAFT, q.total))),
        ]:
            raw = randomness.raw64(seed, 1, 0, purpose)
            assert [piece.result for piece in pieces if piece.start <= raw < piece.end] == [taken]


def test_draft_draw_is_the_weights_to_the_last_bit() -> None:
    """Each token has within one of weight * 2**64 / total raw integers."""
    q = law.top(law.random_table(6, seed=31)(()), 6)
    for piece in law.pieces(lambda raw: q.token_at(randomness.below(raw, q.total)), law.ALL):
        weight = int(q.weights[q.ids == piece.result].sum())
        assert abs((piece.end - piece.start) * q.total - weight * 2**64) < q.total
