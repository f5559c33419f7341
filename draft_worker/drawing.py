"""How a drafter draws a token, and which distribution it tells the target."""

from __future__ import annotations

from typing import Protocol

import torch

from splitspec.sampling.randomness import CounterNoise, Purpose
from splitspec.sampling.rows import Rows
from splitspec.types import DRAFT_SUPPORT, Rule
from splitspec.wire import SparseDistribution


class DraftNoise(Protocol):
    """Randomness as drafters ask for it."""

    def race(self, position: int, weights: torch.Tensor) -> int: ...

    def draft_token(self, index: int, q: SparseDistribution) -> int:
        """Draft token `index` of the round, drawn from q."""
        ...


class DraftCounterNoise(CounterNoise):
    """The draft worker's noise for one round."""

    def draft_token(self, index: int, q: SparseDistribution) -> int:
        return q.token_at(self.below(index, Purpose.DRAFT, q.total))


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
    top = torch.topk(processed, min(DRAFT_SUPPORT, len(processed)))
    q = SparseDistribution.quantised(top.indices.cpu().numpy(), top.values.cpu().numpy())
    return noise.draft_token(index, q), q
