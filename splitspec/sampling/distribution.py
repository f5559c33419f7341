"""Logits to the distribution that tokens are drawn from, position by position."""

from __future__ import annotations

import torch

from splitspec.types import Sampling


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The processed distribution of each row: temperature, then top-k, then top-p, renormalised.

    logits: [rows, vocabulary], any float type. Returns [rows, vocabulary] float64.
    At temperature 0 each row is one-hot at its argmax (ties to the lowest id).
    The order and the treatment of ties are those of the transformers library's logits processors:
    top-k keeps every token as probable as the k-th, top-p at least one token.
    """
    if sampling.greedy:
        one_hot = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
        return one_hot.scatter_(1, argmax(logits)[:, None], 1.0)
    shifted = logits.double()
    # Largest 0, so that no temperature, however small, divides to infinity.
    shifted = shifted - shifted.amax(dim=1, keepdim=True)
    scaled = shifted / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[1]:
        kth = torch.topk(scaled, sampling.top_k, dim=1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    if sampling.top_p < 1:
        ascending, order = torch.sort(scaled, dim=1)
        dropped = torch.cumsum(torch.softmax(ascending, dim=1), dim=1) <= 1 - sampling.top_p
        dropped[:, -1] = False
        scaled = scaled.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)
    return torch.softmax(scaled, dim=1)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """[rows] ids of the largest float32 logit of each row, ties to the lowest id."""
    return torch.argmax(logits.float(), dim=1)
