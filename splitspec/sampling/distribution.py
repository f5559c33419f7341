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
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[1]:
        kth = torch.topk(scaled, sampling.top_k, dim=1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    probs = torch.softmax(scaled, dim=1)
    if sampling.top_p < 1:
        ascending, order = torch.sort(probs, dim=1)
        dropped = torch.cumsum(ascending, dim=1) <= 1 - sampling.top_p
        dropped[:, -1] = False
        probs = probs.masked_fill(torch.zeros_like(dropped).scatter_(1, order, dropped), 0.0)
        probs = probs / probs.sum(dim=1, keepdim=True)
    return probs


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """[rows] ids of the largest float32 logit of each row, ties to the lowest id."""
    return torch.argmax(logits.float(), dim=1)
