"""The rule for trees whose children are certain: draw from the target, follow the child that equals it."""

from __future__ import annotations

from splitspec.sampling.randomness import Noise, Purpose
from splitspec.sampling.rows import Rows
from splitspec.verification.outcome import Outcome
from splitspec.verification.walk import walk
from splitspec.wire import Draft


def verify_tree_top_m(rows: Rows, draft: Draft, noise: Noise) -> Outcome:
    """Draw from the target at each row, and follow the child that equals the draw; then the draw itself.

    rows: row 0 after the committed tokens, row i + 1 after draft token i. draft: a tree, whose distributions
    aren't looked at. Each row's draw is the noise's NEXT of that row.
    Source: Miao et al., 2305.09781 (SpecInfer), its naive sampling for trees.
    """
    return walk(draft, lambda row, _: noise.draw(row, Purpose.NEXT, rows.probabilities(row)))
