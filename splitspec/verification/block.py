"""The block rule: accept the longest prefix that a test of whole prefixes allows."""

from __future__ import annotations

from splitspec.sampling.randomness import Noise, Purpose
from splitspec.sampling.rows import Rows
from splitspec.verification.outcome import Outcome
from splitspec.verification.residual import positive_part, residual
from splitspec.wire import Draft, SparseDistribution


def verify_block(rows: Rows, draft: Draft, noise: Noise) -> Outcome:
    """Accept the first tau draft tokens, tau the largest i whose test passes: u_i < h_i, independent u_i.

    P_0 = 1; P_i = min(1, P_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i)), with x_i draft token i - 1.
    Z_i = sum_y max(P_i p_i(y) - q_i(y), 0); h_i = Z_i / (Z_i + 1 - P_i), 1 for 0 / 0; h_K = P_K.
    Then draw from p_K if tau = K, else from the normalised positive part of P_tau p_tau - q_tau.

    rows: row i is p_i, after the first i draft tokens. draft: a chain of K tokens with K distributions, the
    very ones that the tokens were drawn from; None counts as one-hot.
    Noise, which must be fresh in each round, as tests behind the first failing one count: u_i by index i - 1,
    the correction after tau tokens by tau, and the bonus by K.
    Source: Sun et al., 2403.10444, its algorithm for block verification.
    """
    num_draft_tokens = len(draft.token_ids)
    q = [
        sent or SparseDistribution.one_hot(token)
        for token, sent in zip(draft.token_ids, draft.distributions, strict=True)
    ]
    scales = [1.0]  # P_0, P_1, ..., up to the first 0: behind it every h_i is 0
    while scales[-1] and len(scales) <= num_draft_tokens:
        i = len(scales) - 1
        token = draft.token_ids[i]
        scales.append(min(1.0, scales[i] * float(rows.probabilities(i)[token]) / q[i].probability(token)))
    for tau in range(len(scales) - 1, 0, -1):
        if noise.accepts(tau - 1, *_test(rows, q, tau, scales[tau])):
            break
    else:
        tau = 0
    if tau == num_draft_tokens:
        next_token = noise.draw(tau, Purpose.NEXT, rows.probabilities(tau))
    else:
        rest = residual(scales[tau] * rows.probabilities(tau), q[tau])
        next_token = noise.draw(tau, Purpose.RESIDUAL, rest)
    return Outcome.of_chain(num_draft_tokens, tau, next_token)


def _test(rows: Rows, q: list[SparseDistribution], i: int, scale: float) -> tuple[float, float]:
    """Numerator and denominator of h_i. scale: P_i."""
    if i == len(q):
        return scale, 1.0
    if not scale:
        return 0.0, 1.0
    mass = float(positive_part(scale * rows.probabilities(i), q[i]).sum())
    denominator = mass + 1 - scale
    return (mass, denominator) if denominator else (1.0, 1.0)
