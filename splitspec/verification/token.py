"""The token rule: accept with min(1, p/q), else draw from the residual."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splitspec.sampling.randomness import Noise, Purpose
from splitspec.verification.outcome import Outcome
from splitspec.wire import SparseDistribution


def verify_token(
    p: torch.Tensor,
    draft_tokens: Sequence[int],
    q: Sequence[SparseDistribution | None],
    noise: Noise,
) -> Outcome:
    """Accept draft token i with probability min(1, p_i/q_i); at the first rejection draw from the residual.

    p: [K+1, vocabulary] float64; row i conditions on the first i draft tokens. draft_tokens: K ids.
    q: K distributions, the very ones that the tokens were drawn from; None counts as one-hot, so that
    the token is accepted with probability p_i and the residual is p_i without it.
    Source: Leviathan et al., 2211.17192, section 2.3 and appendix A.1; Chen et al., 2302.01318, algorithm 2.
    """
    num_draft_tokens = len(draft_tokens)
    p_drafted = p[range(num_draft_tokens), list(draft_tokens)].tolist()
    for i, token in enumerate(draft_tokens):
        q_i = q[i] or SparseDistribution.one_hot(token)
        if not noise.accepts(i, p_drafted[i], q_i.probability(token)):
            next_token = noise.draw(i, Purpose.RESIDUAL, residual(p[i], q_i))
            return Outcome(num_draft_tokens, i, next_token)
    next_token = noise.draw(num_draft_tokens, Purpose.NEXT, p[num_draft_tokens])
    return Outcome(num_draft_tokens, num_draft_tokens, next_token)


def residual(p: torch.Tensor, q: SparseDistribution) -> torch.Tensor:
    """The positive part of p - q, not normalised; p itself where rounding leaves nothing.

    p: [vocabulary] float64. Touches only the support of q.
    """
    ids = torch.from_numpy(q.ids.astype("int64")).to(p.device)
    rest = p.clone()
    rest[ids] = (p[ids] - torch.from_numpy(q.probabilities).to(p.device)).clamp_(min=0)
    return rest if bool(rest.sum() > 0) else p
