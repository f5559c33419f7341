"""How a drafter draws a token, and which distribution it tells the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from splitspec.sampling.randomness import CounterNoise, Purpose, delays, shared_words
from splitspec.sampling.rows import Rows
from splitspec.types import DRAFT_SUPPORT, Drawing, Rule
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


def ranking(drawing: Drawing) -> Drawing:
    """At temperature 0 q is one-hot and ranks nothing: confidence is that of temperature 1 there."""
    if drawing.rule is not Rule.GREEDY:
        return drawing
    sampling = replace(drawing.sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    return replace(drawing, rule=Rule.BLOCK, sampling=sampling)


def runners_up(
    rule: Rule,
    rows: Rows,
    row: int,
    position: int,
    count: int,
    without: Sequence[int],
    noise: DraftNoise,
) -> list[int]:
    """The `count` likeliest next tokens at a row of q in falling order, `without` some.

    rows: of `ranking`. Under shared noise they are the runners-up of the race at the position, which the
    target runs on the same noise; else the most probable tokens.
    """
    if not count:
        return []
    weights = rows.probabilities(row).cpu()
    if rule is Rule.SHARED_NOISE:
        weights = weights / torch.from_numpy(noise.delays(position, len(weights)))
    top = torch.topk(weights, min(count + len(without), len(weights)))
    found = [token for token, weight in zip(top.indices.tolist(), top.values.tolist(), strict=True) if weight]
    return [token for token in found if token not in without][:count]


def _sent(processed: torch.Tensor) -> SparseDistribution:
    """The DRAFT_SUPPORT most probable tokens of [vocabulary] float64, quantised."""
    top = torch.topk(processed, min(DRAFT_SUPPORT, len(processed)))
    return SparseDistribution.quantised(top.indices.cpu().numpy(), top.values.cpu().numpy())
