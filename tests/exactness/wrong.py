"""Implementations that look right and aren't: the suite must reject each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from splitspec.sampling.randomness import Noise, Purpose
from splitspec.verification.outcome import Outcome
from splitspec.verification.token import residual, verify_token
from splitspec.wire import Draft, SparseDistribution
from tests.exactness import law
from tests.exactness.law import BranchingNoise, Implementation, Prefix, Table, Verify

Distributions = Sequence[SparseDistribution | None]
Drawn = tuple[int, SparseDistribution | None]


def right_step(noise: BranchingNoise, index: int, row: torch.Tensor) -> Drawn:
    q = law.top(row, len(row))
    return noise.draft_token(index, q), q


right = law.chain(right_step)


# Drafts that send another distribution than the one they drew from.


def coarse_after_the_draw(noise: BranchingNoise, index: int, row: torch.Tensor) -> Drawn:
    """Draw from q, then round q to a grid of 1/16."""
    token, _ = right_step(noise, index, row)
    weights = np.rint(16 * row.numpy())
    weights[token] = max(1, weights[token])
    ids = np.flatnonzero(weights)
    return token, SparseDistribution(ids.astype(np.uint32), weights[ids].astype(np.uint16))


def top_after_the_draw(noise: BranchingNoise, index: int, row: torch.Tensor) -> Drawn:
    """Draw from all of q, send its two most probable tokens."""
    return right_step(noise, index, row)[0], law.top(row, 2)


def unchecked(draft: Draft, vocabulary_size: int) -> Draft:
    """A wire that lets a token through which isn't in the distribution sent with it."""
    return draft


def argmax_sent_as_drawn(noise: BranchingNoise, index: int, row: torch.Tensor) -> Drawn:
    """Propose the argmax, send q as if the token had been drawn from it."""
    return int(torch.argmax(row)), law.top(row, len(row))


def one_draw_for_the_chain(noise: BranchingNoise, index: int, row: torch.Tensor) -> Drawn:
    """Draw every token of the chain with the random value of the first."""
    return right_step(noise, 0, row)


def drop_unlikely(noise: BranchingNoise, q: Table, prefix: Prefix, num_draft_tokens: int) -> Draft:
    """End the chain before the first token of low q, which is thrown away."""
    draft = right(noise, q, prefix, num_draft_tokens)
    for i, (token, row) in enumerate(zip(draft.token_ids, draft.distributions, strict=True)):
        if row is not None and row.probability(token) < 0.4:
            return Draft(draft.token_ids[:i], draft.distributions[:i])
    return draft


# Rules that draw the correction from something else than the residual.


def correcting(correct: Callable[[torch.Tensor, int, SparseDistribution, Noise], int]) -> Verify:
    """The token rule with another correction: (p, index of the rejection, q, noise) to a token."""

    def verify(p: torch.Tensor, tokens: Sequence[int], q: Distributions, noise: Noise) -> Outcome:
        for i, token in enumerate(tokens):
            q_i = q[i] or SparseDistribution.one_hot(token)
            if not noise.accepts(i, float(p[i, token]), q_i.probability(token)):
                return Outcome(len(tokens), i, correct(p, i, q_i, noise))
        return Outcome(len(tokens), len(tokens), noise.draw(len(tokens), Purpose.NEXT, p[-1]))

    return verify


def from_p(p: torch.Tensor, i: int, q: SparseDistribution, noise: Noise) -> int:
    return noise.draw(i, Purpose.RESIDUAL, p[i])


def from_the_difference(p: torch.Tensor, i: int, q: SparseDistribution, noise: Noise) -> int:
    """The absolute value of p - q instead of its positive part."""
    dense = torch.zeros_like(p[i])
    dense[torch.from_numpy(q.ids.astype(np.int64))] = torch.from_numpy(q.probabilities)
    return noise.draw(i, Purpose.RESIDUAL, (p[i] - dense).abs())


def from_the_next_row(p: torch.Tensor, i: int, q: SparseDistribution, noise: Noise) -> int:
    return noise.draw(i, Purpose.RESIDUAL, residual(p[i + 1], q))


def with_the_acceptance_uniform(p: torch.Tensor, i: int, q: SparseDistribution, noise: Noise) -> int:
    """The uniform that has just rejected the token draws the correction too."""
    return noise.draw(i, Purpose.ACCEPTANCE, residual(p[i], q))


# Rules that accept wrongly, or take the bonus from elsewhere.


def accepts_at_most(u: float, numerator: float, denominator: float) -> bool:
    """Not strict: u = 0 passes a token of probability 0."""
    return u * denominator <= numerator


def accepts_inverted(u: float, numerator: float, denominator: float) -> bool:
    return u * numerator < denominator


class OneUniform:
    """Noise that decides on every position with the uniform of the first."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def accepts(self, index: int, numerator: float, denominator: float) -> bool:
        return self._noise.accepts(0, numerator, denominator)

    def draw(self, index: int, purpose: Purpose, weights: torch.Tensor) -> int:
        return self._noise.draw(index, purpose, weights)


def one_uniform(p: torch.Tensor, tokens: Sequence[int], q: Distributions, noise: Noise) -> Outcome:
    return verify_token(p, tokens, q, OneUniform(noise))


def bonus_from_the_last_draft_row(
    p: torch.Tensor, tokens: Sequence[int], q: Distributions, noise: Noise
) -> Outcome:
    return verify_token(torch.cat([p[:-1], p[-2:-1]]), tokens, q, noise)


def every_row_one_late(p: torch.Tensor, tokens: Sequence[int], q: Distributions, noise: Noise) -> Outcome:
    return verify_token(torch.cat([p[1:], p[-1:]]), tokens, q, noise)


def lost_without_fallback(p: torch.Tensor, tokens: Sequence[int], q: Distributions, noise: Noise) -> Outcome:
    """Certain tokens are accepted with p, but a rejected one may come again as the correction."""
    return correcting(lambda p, i, _, noise: noise.draw(i, Purpose.RESIDUAL, p[i]))(
        p, tokens, [None] * len(tokens), noise
    )


#: Biased by more than rounding.
BIASED: dict[str, Implementation] = {
    "quantised after the draw": Implementation(law.chain(coarse_after_the_draw)),
    "truncated after the draw": Implementation(law.chain(top_after_the_draw), relay=unchecked),
    "argmax verified with softmax": Implementation(law.chain(argmax_sent_as_drawn)),
    "one draw for the chain": Implementation(law.chain(one_draw_for_the_chain)),
    "unlikely token dropped": Implementation(drop_unlikely),
    "residual is p": Implementation(right, correcting(from_p)),
    "residual is |p - q|": Implementation(right, correcting(from_the_difference)),
    "residual of the next row": Implementation(right, correcting(from_the_next_row)),
    "acceptance uniform draws the residual": Implementation(right, correcting(with_the_acceptance_uniform)),
    "one-hot without its residual": Implementation(right, lost_without_fallback),
    "ratio inverted": Implementation(right, accepts=accepts_inverted),
    "one uniform for all positions": Implementation(right, one_uniform),
    "bonus from the row before": Implementation(right, bonus_from_the_last_draft_row),
    "rows shifted": Implementation(right, every_row_one_late),
}
#: Biased by 2**-53, but it emits what the target never does.
NOT_STRICT = Implementation(right, accepts=accepts_at_most)
