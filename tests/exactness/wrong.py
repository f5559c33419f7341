"""Implementations that look right and aren't: the suite must reject each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from splitspec.sampling.randomness import Noise, Purpose
from splitspec.sampling.rows import ProcessedRows, Rows
from splitspec.types import Rule
from splitspec.verification.outcome import Outcome
from splitspec.verification.residual import positive_part, residual
from splitspec.verification.token import verify_token
from splitspec.wire import Draft, SparseDistribution
from tests.exactness import drafting
from tests.exactness.drafting import RoundNoise, chain, top
from tests.exactness.enumeration import BranchNoise
from tests.exactness.law import Decide, decide_by
from tests.exactness.tables import Model, Prefix, ProcessedModel, TableRows

Drawn = tuple[int, SparseDistribution | None]

right = chain(drafting.drawn)

# Drafts that send another distribution than the one they drew from.


def coarse_after_the_draw(noise: RoundNoise, index: int, q: Rows) -> Drawn:
    """Draw from q, then round q to a grid of 1/16."""
    token, _ = drafting.drawn(noise, index, q)
    weights = np.rint(16 * q.probabilities(0).numpy())
    weights[token] = max(1, weights[token])
    ids = np.flatnonzero(weights)
    return token, SparseDistribution(ids.astype(np.uint32), weights[ids].astype(np.uint16))


def top_after_the_draw(noise: RoundNoise, index: int, q: Rows) -> Drawn:
    """Draw from all of q, send its two most probable tokens."""
    return drafting.drawn(noise, index, q)[0], top(q.probabilities(0), 2)


def unchecked(drafts: Sequence[Draft], vocabulary_size: int) -> Draft:
    """A wire that lets a token through which isn't in the distribution sent with it."""
    return drafts[-1]


def argmax_sent_as_drawn(noise: RoundNoise, index: int, q: Rows) -> Drawn:
    """Propose the argmax, send q as if the token had been drawn from it."""
    return q.argmax(0), top(q.probabilities(0), 4)


def one_draw_for_the_chain(noise: RoundNoise, index: int, q: Rows) -> Drawn:
    """Draw every token of the chain with the random value of the first."""
    return drafting.drawn(noise, 0, q)


def drop_unlikely(noise: RoundNoise, q: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
    """End the chain before the first token of low q, which is thrown away."""
    draft = right(noise, q, prefix, num_draft_tokens)
    for i, (token, row) in enumerate(zip(draft.token_ids, draft.distributions, strict=True)):
        if row is not None and row.probability(token) < 0.4:
            return Draft(draft.token_ids[:i], draft.distributions[:i])
    return draft


def stale_distributions(drafts: Sequence[Draft], vocabulary_size: int) -> Draft:
    """A target that still holds the distributions of the round before."""
    return Draft(drafts[-1].token_ids, drafts[-2 if len(drafts) > 1 else -1].distributions)


def below_by_24_bits(raw: int, bound: int) -> int:
    """The multiply-shift of a 24-bit integer, as of a float32 uniform."""
    return ((raw >> 40) * bound) >> 24


# The token rule with the correction drawn from something else than the residual.


def correcting(correct: Callable[[Rows, int, SparseDistribution, Noise], int]) -> Decide:
    """The token rule with another correction: (rows, index of the rejection, q, noise) to a token."""

    def decide(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
        count = len(draft.token_ids)
        for i, token in enumerate(draft.token_ids):
            q = draft.distributions[i] or SparseDistribution.one_hot(token)
            if not noise.accepts(i, float(rows.probabilities(i)[token]), q.probability(token)):
                return Outcome.of_chain(count, i, correct(rows, i, q, noise))
        return Outcome.of_chain(count, count, noise.draw(count, Purpose.NEXT, rows.probabilities(count)))

    return decide


def from_p(rows: Rows, i: int, q: SparseDistribution, noise: Noise) -> int:
    return noise.draw(i, Purpose.RESIDUAL, rows.probabilities(i))


def from_the_difference(rows: Rows, i: int, q: SparseDistribution, noise: Noise) -> int:
    """The absolute value of p - q instead of its positive part."""
    dense = torch.zeros_like(rows.probabilities(i))
    dense[torch.from_numpy(q.ids.astype(np.int64))] = torch.from_numpy(q.probabilities)
    return noise.draw(i, Purpose.RESIDUAL, (rows.probabilities(i) - dense).abs())


def from_the_next_row(rows: Rows, i: int, q: SparseDistribution, noise: Noise) -> int:
    return noise.draw(i, Purpose.RESIDUAL, residual(rows.probabilities(i + 1), q))


def with_the_acceptance_uniform(rows: Rows, i: int, q: SparseDistribution, noise: Noise) -> int:
    """The uniform that has just rejected the token draws the correction too."""
    return noise.draw(i, Purpose.ACCEPTANCE, residual(rows.probabilities(i), q))


# Rules that accept wrongly, or take the bonus from elsewhere.


def accepts_at_most(u: float, numerator: float, denominator: float) -> bool:
    """Not strict: u = 0 passes a token of probability 0."""
    return u * denominator <= numerator


def accepts_inverted(u: float, numerator: float, denominator: float) -> bool:
    return u * numerator < denominator


@dataclass(frozen=True)
class OneUniform:
    """Noise that decides on every position from `last` on with the same uniform, or draws all from one."""

    noise: Noise
    last: int = 0
    last_drawn: int = 1000

    def accepts(self, index: int, numerator: float, denominator: float) -> bool:
        return self.noise.accepts(min(index, self.last), numerator, denominator)

    def draw(self, index: int, purpose: Purpose, weights: torch.Tensor) -> int:
        return self.noise.draw(min(index, self.last_drawn), purpose, weights)

    def race(self, position: int, weights: torch.Tensor) -> int:
        return self.noise.race(position, weights)


@dataclass(frozen=True)
class ByPosition:
    """Noise that is keyed by absolute position instead of by round and index."""

    noise: Noise
    base_length: int

    def accepts(self, index: int, numerator: float, denominator: float) -> bool:
        return self.noise.accepts(self.base_length + index, numerator, denominator)

    def draw(self, index: int, purpose: Purpose, weights: torch.Tensor) -> int:
        return self.noise.draw(self.base_length + index, purpose, weights)

    def race(self, position: int, weights: torch.Tensor) -> int:
        return self.noise.race(position, weights)


def by_position(rule: Rule) -> Decide:
    def decide(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
        assert isinstance(noise, BranchNoise)
        return decide_by(rule)(rows, draft, base_length, ByPosition(noise.streams.round(0), base_length))

    return decide


def one_uniform(rule: Rule, last: int = 0, last_drawn: int = 1000) -> Decide:
    """last: the position, last_drawn: the row, from which on all have the same uniform."""

    def decide(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
        return decide_by(rule)(rows, draft, base_length, OneUniform(noise, last, last_drawn))

    return decide


def bonus_from_the_last_draft_row(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
    count = len(draft.token_ids)
    return verify_token(
        TableRows([rows.probabilities(min(i, count - 1)) for i in range(count + 1)]), draft, noise
    )


def every_row_one_late(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
    count = len(draft.token_ids)
    return verify_token(
        TableRows([rows.probabilities(min(i + 1, count)) for i in range(count + 1)]), draft, noise
    )


def lost_without_fallback(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
    """Certain tokens are accepted with p, but a rejected one may come again as the correction."""
    return correcting(from_p)(rows, Draft.certain(draft.token_ids), base_length, noise)


# Block rules.


def block(
    *,
    early_stop: bool = False,
    ordinary_residual: bool = False,
    ordinary_test: bool = False,
    least_scale: float = 0.0,
) -> Decide:
    """The block rule with one mistake. least_scale: of the residual."""

    def decide(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
        count = len(draft.token_ids)
        scale, tau, scale_of_tau = 1.0, 0, 1.0
        for i, token in enumerate(draft.token_ids, start=1):
            q = draft.distributions[i - 1]
            assert q is not None
            ratio = float(rows.probabilities(i - 1)[token]) / q.probability(token)
            scale = min(1.0, scale * ratio)
            numerator, denominator = scale, 1.0
            if i < count and not ordinary_test:
                following = draft.distributions[i]
                assert following is not None
                numerator = float(positive_part(scale * rows.probabilities(i), following).sum())
                denominator = numerator + 1 - scale
            if noise.accepts(i - 1, numerator, denominator):
                tau, scale_of_tau = i, scale
            elif early_stop:
                break
        if tau == count:
            return Outcome.of_chain(count, tau, noise.draw(tau, Purpose.NEXT, rows.probabilities(tau)))
        q = draft.distributions[tau]
        assert q is not None
        scale = 1 if ordinary_residual else max(scale_of_tau, least_scale)
        rest = residual(scale * rows.probabilities(tau), q)
        return Outcome.of_chain(count, tau, noise.draw(tau, Purpose.RESIDUAL, rest))

    return decide


# Rows that aren't those of their positions.


def frozen_history(p: Model, prefix: Prefix, paths: tuple[Prefix, ...]) -> Rows:
    """Penalties and limits as they are before the block, on all of its rows."""
    assert isinstance(p, ProcessedModel)
    return ProcessedRows(p.logits(prefix, paths), p.drawing, p.prompt + prefix, [()] * len(paths))


def bonus_unprocessed(p: Model, prefix: Prefix, paths: tuple[Prefix, ...]) -> Rows:
    assert isinstance(p, ProcessedModel)
    rows = p(prefix, paths)
    bonus = torch.softmax(p.logits(prefix, paths)[-1].double(), dim=0)
    return TableRows([*(rows.probabilities(row) for row in range(len(paths) - 1)), bonus])


def only_the_bonus_processed(p: Model, prefix: Prefix, paths: tuple[Prefix, ...]) -> Rows:
    assert isinstance(p, ProcessedModel)
    raw = torch.softmax(p.logits(prefix, paths).double(), dim=1)
    return TableRows([*raw[:-1], p(prefix, paths).probabilities(len(paths) - 1)])
