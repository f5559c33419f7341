"""Distances between the target's distribution and the draft's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

_ROWS_AT_ONCE = 1024


class _HeadCrossEntropy(torch.autograd.Function):
    """Cross-entropy of softmax(hidden @ head.T) against given probabilities, some rows at a time.

    The gradient of the logits, softmax minus probabilities, is known in the forward pass, so that logits
    are never kept: with a vocabulary in the thousands they would be most of the memory traffic of a step.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        compact = head.to(teacher.dtype)
        loss = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        head_gradient = torch.zeros_like(head)
        for start in range(0, len(hidden), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            x, p, weight = hidden[part].to(teacher.dtype), teacher[part], weights[part]
            logits = x @ compact.T
            q = logits.softmax(dim=-1)
            top, index = logits.max(dim=-1)
            log_sum = top.float() - q.gather(-1, index[:, None])[:, 0].float().log()
            loss += ((log_sum - torch.linalg.vecdot(p, logits).float()) * weight).sum()
            difference = q.sub_(p)
            hidden_gradient[part] = (difference @ compact) * weight[:, None]
            head_gradient += difference.T @ (x * weight[:, None].to(x.dtype))
        ctx.save_for_backward(hidden_gradient, head_gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden_gradient, head_gradient = ctx.saved_tensors
        return hidden_gradient * gradients[0], head_gradient * gradients[0], None, None


def head_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sum over rows of the cross-entropy of softmax(hidden @ head.T) against `teacher`.

    hidden: [rows, hidden]. head: [vocabulary, hidden]. teacher: [rows, vocabulary] probabilities, in the
    dtype to compute in. weights: [rows] float32. Differentiable in hidden and head.
    """
    loss: torch.Tensor = _HeadCrossEntropy.apply(hidden, head, teacher, weights)  # type: ignore[no-untyped-call]
    return loss


def reference_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """`head_cross_entropy` in plain steps."""
    log_q = functional.log_softmax(functional.linear(hidden, head).float(), dim=-1)
    return -((log_q * teacher).sum(dim=-1) * weights).sum()


def forward_kl(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of each row. target, draft: logits [rows, vocabulary]; p is the target's distribution."""
    log_p, log_q = target.log_softmax(dim=-1), draft.log_softmax(dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def reverse_kl(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """KL(q || p) of each row."""
    return forward_kl(draft, target)


def total_variation(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Half of the sum of |p - q| of each row: the chance that a drawn draft token is rejected."""
    return (target.softmax(dim=-1) - draft.softmax(dim=-1)).abs().sum(dim=-1) / 2


DIVERGENCES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
}
