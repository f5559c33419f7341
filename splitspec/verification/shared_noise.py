"""The shared-noise rule: accept while equal to the draw that the noise of the position gives."""

from __future__ import annotations

from splitspec.sampling.randomness import Noise
from splitspec.sampling.rows import Rows
from splitspec.verification.outcome import Outcome
from splitspec.verification.walk import walk
from splitspec.wire import Draft


def verify_shared_noise(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
    """Follow the draft tokens that equal the winner of the race at their position; then the winner itself.

    rows: row 0 after the committed tokens, row i + 1 after draft token i. draft: K tokens, a chain or a tree.
    base_length: committed tokens, so that the first draft token has this position.
    What is emitted is a function of target, prompt and seed: the draft only decides how fast. One that races
    its own distributions on the same noise is accepted with at least (1 - TV) / (1 + TV).
    Source: Daliri et al., 2408.07978, Gumbel sampling and drafter-invariant speculative decoding.
    """
    return walk(draft, lambda row, depth: noise.race(base_length + depth, rows.probabilities(row)))
