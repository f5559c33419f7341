"""Logits to the distribution that a token is drawn from."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from splitspec.types import Sampling

# Top-p's ranges of scores: so fine that one holds few tokens, and down to e**-32, where no mass is left.
_RANGES_PER_NAT = 64
_NUM_RANGES = 32 * _RANGES_PER_NAT


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The processed distribution of a row: temperature, then top-k, top-p and min-p, renormalised.

    logits: [vocabulary], any float type, not all -inf. Returns [vocabulary] float64.
    At temperature 0 it is one-hot at the argmax (ties to the lowest id).
    The order and the treatment of ties are those of the transformers library's logits processors: top-k
    keeps every token as probable as the k-th; top-p at least one token, and of those as probable as its
    last one the highest ids; min-p every token as probable as its bound.
    """
    if sampling.greedy:
        one_hot = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
        one_hot[argmax(logits)] = 1
        return one_hot
    if 0 < sampling.top_k < len(logits):
        kept = torch.nonzero(logits >= torch.topk(logits, sampling.top_k).values[-1]).flatten()
        none = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
        return none.index_copy_(0, kept, _normalised(logits[kept], sampling))
    return _normalised(logits, sampling)


def argmax(logits: torch.Tensor) -> int:
    """The id of the largest of [vocabulary] logits, ties to the lowest id."""
    return int(torch.argmax(logits))


def _normalised(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[n] float64 of the [n] logits that top-k leaves: temperature, top-p, min-p."""
    # Largest 0 before the division, so that no temperature, however small, divides to infinity.
    scores = (logits.double() - logits.amax()).div_(sampling.temperature)
    weights = torch.exp(scores)
    if sampling.top_p < 1:
        _leave_nucleus(weights, scores, sampling.top_p)
    if sampling.min_p > 0:
        # The largest weight is 1. What equals the bound stays.
        functional.threshold(weights, math.nextafter(sampling.min_p, 0), 0, inplace=True)
    return weights.mul_(1 / weights.sum())


def _leave_nucleus(weights: torch.Tensor, scores: torch.Tensor, top_p: float) -> None:
    """Set to 0 all weights ([n] float64) but the fewest largest ones that reach top_p of their sum.

    scores: [n] float64, at most 0, in the order of the weights. Weights are summed up by ranges of scores, so
    that only the range in which the sum reaches its share is sorted: a full sort would take 3 ms.
    """
    ranges = (scores * -_RANGES_PER_NAT).clamp_(max=_NUM_RANGES - 1).int()
    # Added up in order, which an accelerator might not: the range that reaches the share then has some.
    reached = torch.bincount(ranges, weights, minlength=_NUM_RANGES).cpu().cumsum(0)
    enough = top_p * float(reached[-1])
    last = int(torch.searchsorted(reached, enough))
    inside = torch.nonzero(ranges == last).flatten().flip(0)
    falling = torch.sort(weights[inside], descending=True, stable=True)
    reached = falling.values.cpu().cumsum(0) + (reached[last - 1] if last else 0)
    num_kept = int(torch.searchsorted(reached, enough)) + 1
    kept = falling.values[:num_kept]
    functional.threshold(weights, float(kept[-1]), 0, inplace=True)
    weights[inside[falling.indices[:num_kept]]] = kept
