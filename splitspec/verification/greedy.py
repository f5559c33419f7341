"""The greedy rule: accept while equal to the target's argmax."""

from __future__ import annotations

from splitspec.sampling.rows import Rows
from splitspec.verification.outcome import Outcome
from splitspec.verification.walk import walk
from splitspec.wire import Draft


def verify_greedy(rows: Rows, draft: Draft) -> Outcome:
    """Follow the draft tokens that equal the target's argmax; then the argmax itself.

    rows: row 0 after the committed tokens, row i + 1 after draft token i. draft: K tokens, a chain or a tree.
    Source: Leviathan et al., 2211.17192, section 2.2, in the limit of temperature 0.
    """
    return walk(draft, lambda row, _: rows.argmax(row))
