"""What of the target distribution the draft's distribution doesn't cover."""

from __future__ import annotations

import torch

from splitspec.wire import SparseDistribution


def positive_part(p: torch.Tensor, q: SparseDistribution) -> torch.Tensor:
    """[vocabulary] float64: max(p - q, 0), not normalised.

    p: [vocabulary] float64, in any scale. Touches only the support of q.
    """
    ids = torch.from_numpy(q.ids.astype("int64")).to(p.device)
    rest = p.clone()
    rest[ids] = (p[ids] - torch.from_numpy(q.probabilities).to(p.device)).clamp_(min=0)
    return rest


def residual(p: torch.Tensor, q: SparseDistribution) -> torch.Tensor:
    """The positive part of p - q, not normalised; p itself where rounding leaves nothing."""
    rest = positive_part(p, q)
    return rest if bool(rest.sum() > 0) else p
