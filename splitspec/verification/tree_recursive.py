"""Recursive rejection sampling: the rule for trees whose children were drawn without replacement."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splitspec.sampling.randomness import Noise, Purpose
from splitspec.sampling.rows import Rows
from splitspec.verification.outcome import Outcome
from splitspec.verification.residual import residual
from splitspec.verification.walk import walk
from splitspec.wire import Draft, SparseDistribution


def verify_tree_recursive(rows: Rows, draft: Draft, noise: Noise) -> Outcome:
    """At each row try the children in the order they were drawn in; follow the accepted one.

    rows: row 0 after the committed tokens, row i + 1 after draft token i. draft: a tree; the number of
    children of each row was fixed before they were drawn, and none was removed. A row without a distribution
    has certain children, and is decided as by `verify_tree_top_m`.
    Noise: acceptance of node i by index i; the correction or next token of a row by the row.
    Source: Jeon et al., 2402.14160, recursive rejection sampling; Chen et al., 2402.12374 (Sequoia).
    """
    children = draft.children

    def choose(row: int, _: int) -> int:
        p, q = rows.probabilities(row), draft.distributions[row] if draft.distributions else None
        if q is None:
            return noise.draw(row, Purpose.NEXT, p)
        return _accepted_or_corrected(
            p, q, row, [(node, draft.token_ids[node]) for node in children[row]], noise
        )

    return walk(draft, choose)


def _accepted_or_corrected(
    p: torch.Tensor, q: SparseDistribution, row: int, children: Sequence[tuple[int, int]], noise: Noise
) -> int:
    """The first accepted child's token, or else one of what the rejections leave of p.

    p: [vocabulary] float64. children: (node, token), in the order that they were drawn from q.
    """
    for node, token in children:
        if noise.accepts(node, float(p[token]), q.probability(token)):
            return token
        p = residual(p, q)
        p = p / p.sum()
        q = q.without(token)
    return noise.draw(row, Purpose.RESIDUAL, p)
