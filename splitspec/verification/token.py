"""The token rule: accept with min(1, p/q), else draw from the residual."""

from __future__ import annotations

from splitspec.sampling.randomness import Noise, Purpose
from splitspec.sampling.rows import Rows
from splitspec.verification.outcome import Outcome
from splitspec.verification.residual import residual
from splitspec.wire import Draft, SparseDistribution


def verify_token(rows: Rows, draft: Draft, noise: Noise) -> Outcome:
    """Accept draft token i with probability min(1, p_i/q_i); at the first rejection draw from the residual.

    rows: row i is p_i, after the first i draft tokens. draft: a chain of K tokens with K distributions, the
    very ones that the tokens were drawn from; None counts as one-hot, so that the token is accepted with
    probability p_i and the residual is p_i without it.
    Noise: acceptance of token i by index i, its correction by i, and the bonus by K.
    Source: Leviathan et al., 2211.17192, section 2.3 and appendix A.1; Chen et al., 2302.01318, algorithm 2.
    """
    num_draft_tokens = len(draft.token_ids)
    for i, (token, sent) in enumerate(zip(draft.token_ids, draft.distributions, strict=True)):
        p, q = rows.probabilities(i), sent or SparseDistribution.one_hot(token)
        if not noise.accepts(i, float(p[token]), q.probability(token)):
            return Outcome.of_chain(num_draft_tokens, i, noise.draw(i, Purpose.RESIDUAL, residual(p, q)))
    bonus = noise.draw(num_draft_tokens, Purpose.NEXT, rows.probabilities(num_draft_tokens))
    return Outcome.of_chain(num_draft_tokens, num_draft_tokens, bonus)
