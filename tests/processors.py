"""The transformers library's logits processors, put together as its `generate` does: the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from splitspec.types import Output, Sampling


def processed_logits(
    logits: torch.Tensor, tokens: Sequence[int], sampling: Sampling, output: Output
) -> torch.Tensor:
    """[vocabulary] float64: what the library makes of a [vocabulary] row behind `tokens`, before temperature.

    Between its repetition penalty and the ids that it leaves out come OpenAI's penalties, which it lacks.
    The biases have to be numbers of float32.
    """
    ids, scores = torch.tensor([tokens]), logits.double()[None]
    for processor in _additions(sampling):
        scores = processor(ids, scores)
    scores = scores.clone()
    # mu[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts the output so far.
    for token, count in Counter(tokens[output.start :]).items():
        scores[0, token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    for processor in _exclusions(sampling, output):
        scores = processor(ids, scores)
    return scores[0]


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[vocabulary] float64: the distribution that the library draws from, above temperature 0."""
    ids, scores = torch.zeros((1, 1), dtype=torch.long), logits.double()[None]
    for warper in _warpers(sampling):
        scores = warper(ids, scores)
    return torch.softmax(scores[0], dim=0)


def _additions(sampling: Sampling) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = []
    if sampling.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[t], b] for t, b in sampling.logit_bias.items()]))
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    return found


def _exclusions(sampling: Sampling, output: Output) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = []
    if output.min_tokens:
        ending = sorted(output.ending_token_ids)
        found.append(MinNewTokensLengthLogitsProcessor(output.start, output.min_tokens, ending))
    if sampling.allowed_token_ids:
        allowed = sorted(sampling.allowed_token_ids)
        found.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1))
    if sampling.banned_token_ids:
        found.append(SuppressTokensLogitsProcessor(sorted(sampling.banned_token_ids)))
    return found


def _warpers(sampling: Sampling) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found
