"""How a drafter draws a token, and which distribution it tells the target."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from splitspec.sampling.randomness import CounterNoise, Purpose, delays, shared_words
from splitspec.sampling.rows import Rows
from splitspec.types import DRAFT_SUPPORT, Rule
from splitspec.wire import SparseDistribution


class DraftNoise(Protocol):
    """Randomness as drafters ask for it."""

    def race(self, position: int, weights: torch.Tensor) -> int: ...

    def delays(self, position: int, count: int) -> np.ndarray:
        """[count] float64: what the race at a position is run on, of the first `count` ids."""
        ...

    def draft_token(self, index: int, q: SparseDistribution) -> int:
        """Draft token `index` of the round, drawn from q."""
        ...


class DraftCounterNoise(CounterNoise):
    """The draft worker's noise for one round."""

    def draft_token(self, index: int, q: SparseDistribution) -> int:
        return q.token_at(self.below(index, Purpose.DRAFT, q.total))

    def delays(self, position: int, count: int) -> np.ndarray:
        return delays(shared_words(self.seed, position, count))


def draw(
    rule: Rule, rows: Rows, row: int, index: int, position: int, noise: DraftNoise
) -> tuple[int, SparseDistribution | None]:
    """Draft token `index`, which comes to stand at `position` of the session, from a row of q.

    Under the greedy and shared-noise rules it is the token that the target would choose if its distribution
    were q, and no distribution goes with it. Else it is drawn from the DRAFT_SUPPORT most probable tokens:
    truncated and quantised first, then drawn from just that, so that the target gets the same integers.
    """
    if rule is Rule.GREEDY:
        return rows.argmax(row), None
    processed = rows.probabilities(row)
    if rule is Rule.SHARED_NOISE:
        return noise.race(position, processed), None
    q = _sent(processed)
    return noise.draft_token(index, q), q


def draw_children(
    rows: Rows, row: int, index: int, count: int, noise: DraftNoise
) -> tuple[list[int], SparseDistribution]:
    """Children of a row of q, for `verify_tree_recursive`: draft tokens `index` on, drawn one after the other
    from what those before have left of it. As many as `count`, fewer where q has no more.
    """
    q = left = _sent(rows.probabilities(row))
    tokens: list[int] = []
    for child in range(min(count, len(q.ids))):
        tokens.append(noise.draft_token(index + child, left))
        left = left.without(tokens[-1])
    return tokens, q


def _sent(processed: torch.Tensor) -> SparseDistribution:
    """The DRAFT_SUPPORT most probable tokens of [vocabulary] float64, quantised."""
    top = torch.topk(processed, min(DRAFT_SUPPORT, len(processed)))
    return SparseDistribution.quantised(top.indices.cpu().numpy(), top.values.cpu().numpy())
