"""Losses against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from draft_worker.training import losses
from draft_worker.training.losses import DIVERGENCES, head_cross_entropy


def test_head_cross_entropy_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and both gradients, over rows that don't fill the last part."""
    monkeypatch.setattr(losses, "_ROWS_AT_ONCE", 4)
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    head = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(11, 9, dtype=torch.float64).softmax(dim=-1)
    weights = torch.rand(11, dtype=torch.float64)
    log_q = functional.log_softmax(hidden @ head.T, dim=-1)
    plain = -((log_q * teacher).sum(dim=-1) * weights).sum() * 3
    ours = head_cross_entropy(hidden, head, teacher, weights) * 3
    torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(plain, [hidden, head])
    for found, gradient in zip(torch.autograd.grad(ours, [hidden, head]), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_vanish_only_between_equals(name: str) -> None:
    target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])
    divergence = DIVERGENCES[name]
    torch.testing.assert_close(divergence(target, target + 4.0), torch.zeros(2))
    assert (divergence(target, target.flip(0)) > 0.1).all()


def test_divergences_of_known_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    log = torch.log(torch.tensor(2.0))
    found = {name: divergence(p.log(), q.log()) for name, divergence in DIVERGENCES.items()}
    torch.testing.assert_close(found["forward_kl"], 0.25 * log[None])
    torch.testing.assert_close(found["reverse_kl"], 0.25 * log[None])
    torch.testing.assert_close(found["total_variation"], torch.tensor([0.25]))
    peaked = torch.tensor([[0.98, 0.01, 0.01]])
    forward, reverse = (DIVERGENCES[name](p.log(), peaked.log()) for name in ("forward_kl", "reverse_kl"))
    assert forward > reverse
