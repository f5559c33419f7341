"""The enumeration measures what the service does."""

from __future__ import annotations

from draft_worker.drawing import DraftCounterNoise
from splitspec.sampling import randomness
from splitspec.sampling.randomness import Purpose
from tests.exactness import tables
from tests.exactness.drafting import top
from tests.exactness.enumeration import pieces

Q = top(tables.random_table(6, seed=31)(()), 6)


def test_branches_are_those_of_the_counter_noise() -> None:
    """The branch that is measured for a raw integer is the one that the service takes."""
    weights = tables.random_table(6, seed=30)(())
    accepting = pieces(lambda raw: int(randomness.accepts(randomness.unit(raw), 0.3, 0.7)))
    drawing = pieces(lambda raw: randomness.invert(randomness.unit(raw), weights))
    drafting = pieces(lambda raw: Q.token_at(randomness.below(raw, Q.total)))
    for seed in range(1000):
        noise = DraftCounterNoise(seed, 1)
        for purpose, cut, taken in [
            (Purpose.ACCEPTANCE, accepting, int(noise.accepts(0, 0.3, 0.7))),
            (Purpose.NEXT, drawing, noise.draw(0, Purpose.NEXT, weights)),
            (Purpose.DRAFT, drafting, noise.draft_token(0, Q)),
        ]:
            raw = randomness.raw64(seed, 1, 0, purpose)
            assert [piece.result for piece in cut if piece.start <= raw < piece.end] == [taken]


def test_draft_draw_is_the_weights_to_the_last_bit() -> None:
    """Each token has within one of weight * 2**64 / total raw integers."""
    for piece in pieces(lambda raw: Q.token_at(randomness.below(raw, Q.total))):
        weight = int(Q.weights[Q.ids == piece.result].sum())
        assert abs((piece.end - piece.start) * Q.total - weight * 2**64) < Q.total
