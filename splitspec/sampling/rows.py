"""The rows of one pass as the distributions that tokens are drawn from, each with the history up to it."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import torch

from splitspec.sampling.distribution import argmax, probabilities
from splitspec.sampling.logprobs import Logprobs
from splitspec.types import Drawing, Sampling

#: Penalties may push a logit no further, so that no difference of two of them overflows.
_MAX_LOGIT = 1e300


class Rows(Protocol):
    """The target's distribution after the committed tokens and each draft token, as the rules ask for it."""

    def probabilities(self, row: int) -> torch.Tensor:
        """[vocabulary] float64: what a token of this row is drawn from. Not to be changed."""
        ...

    def argmax(self, row: int) -> int:
        """The id of the largest processed logit, ties to the lowest id."""
        ...


class ProcessedRows:
    """The rows of a pass, processed when they are asked for: rows behind a rejection never are.

    Logits first, in this order: logit_bias, repetition_penalty (tokens of the session), presence_penalty and
    frequency_penalty (tokens of the output), then the ids that can't come are left out (banned, not allowed,
    ending before min_tokens). Then temperature, top_k, top_p, min_p (`distribution.probabilities`). A
    row's history is the committed tokens and its path, so each row is what it would be in a pass of its own.
    This is the order of the transformers library's processors, which have no presence and frequency
    penalties: those are OpenAI's.

    Some token always has a finite logit. Where the model rules out all that may come, they are equally
    probable, as the library has it. A draft model's table may lack all of them: then none is left out.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        drawing: Drawing,
        tokens: Sequence[int],
        paths: Sequence[Sequence[int]],
    ) -> None:
        """logits: [rows, vocabulary] float32. tokens: those committed. paths: [rows] draft tokens up to it.

        Parameters and tokens may name ids beyond the vocabulary, which are ignored: a draft model's table may
        be smaller than the target's.
        """
        self._raw = logits
        self._sampling, self._output = drawing.sampling, drawing.output
        self._paths = paths
        self._num_output_tokens = len(tokens) - drawing.output.start
        self._history = _History(tokens, drawing.output.start, logits) if _penalises(self._sampling) else None
        self._known: dict[int, torch.Tensor] = {}

    def probabilities(self, row: int) -> torch.Tensor:
        if row not in self._known:
            self._known[row] = probabilities(self._logits(row), self._sampling)
        return self._known[row]

    def argmax(self, row: int) -> int:
        return argmax(self._logits(row))

    def logprobs(self, row: int, token: int) -> Logprobs:
        """Log-probabilities of a token of this row, and of as many others as the request asks for."""
        raw, p = torch.log_softmax(self._raw[row].double(), dim=0), self.probabilities(row)
        count = self._sampling.logprobs or 0
        return Logprobs(
            raw=float(raw[token]),
            processed=_log(float(p[token])),
            top_raw=tuple(_largest(raw, count, above=-math.inf)),
            top_processed=tuple((other, _log(q)) for other, q in _largest(p, count, above=0.0)),
        )

    def _logits(self, row: int) -> torch.Tensor:
        """[vocabulary] logits of a row after all that acts on logits: float64, or the model's own."""
        path, left_out = self._paths[row], self._left_out_of(row)
        if not self._sampling.logit_bias and self._history is None and left_out is None:
            return self._raw[row]
        logits = self._raw[row].to(torch.float64, copy=True)
        if self._sampling.logit_bias:
            logits.index_add_(0, *self._bias)
        if self._history is not None:
            self._history.penalise(logits, path, self._sampling)
        if left_out is not None:
            logits.masked_fill_(left_out, -math.inf)
            if logits.amax() == -math.inf:
                logits.masked_fill_(~left_out, 0)
        return logits

    def _left_out_of(self, row: int) -> torch.Tensor | None:
        early = self._num_output_tokens + len(self._paths[row]) < self._output.min_tokens
        return self._left_out_early if early else self._left_out

    @functools.cached_property
    def _left_out(self) -> torch.Tensor | None:
        return self._mask(self._sampling.banned_token_ids)

    @functools.cached_property
    def _left_out_early(self) -> torch.Tensor | None:
        return self._mask(self._sampling.banned_token_ids | self._output.ending_token_ids)

    def _mask(self, banned: Collection[int]) -> torch.Tensor | None:
        """[vocabulary] bool: the ids that can't come; None when all can."""
        allowed = self._sampling.allowed_token_ids
        if not banned and not allowed:
            return None
        mask = torch.full(self._raw.shape[1:], bool(allowed), device=self._raw.device)
        mask[_ids(allowed, self._raw)] = False
        mask[_ids(banned, self._raw)] = True
        return None if mask.all() else mask

    @functools.cached_property
    def _bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of the vocabulary, and what is added to their logits."""
        bias = self._sampling.logit_bias
        ids = _ids(bias, self._raw)
        return ids, torch.tensor([bias[token] for token in ids.tolist()], dtype=torch.float64).to(ids.device)


class _History:
    """Which tokens the session holds, and how often its output holds them: counted once in a round."""

    def __init__(self, tokens: Sequence[int], start: int, logits: torch.Tensor) -> None:
        """tokens: those committed. start: where the output begins. logits: [rows, vocabulary]."""
        self._like = logits
        self._ids = torch.nonzero(_counts(tokens[:], logits)).flatten()
        self._counts = _counts(tokens[start:], logits)

    def penalise(self, logits: torch.Tensor, path: Sequence[int], sampling: Sampling) -> None:
        """Change the logits ([vocabulary] float64) of the tokens that are there already, a path's included.

        Penalties may be so large that they overflow: then they leave the largest number.
        """
        drafted = _ids(path, self._like)
        counts = self._counts.index_add(0, drafted, torch.ones_like(drafted))
        # An id may come twice; both times it is given the same.
        ids = torch.cat((self._ids, drafted))
        before, count = logits[ids], counts[ids].double()
        penalty = sampling.repetition_penalty
        after = torch.where(before < 0, before * penalty, before / penalty).clamp_(-_MAX_LOGIT, _MAX_LOGIT)
        after -= sampling.presence_penalty * count.clamp(max=1) + sampling.frequency_penalty * count
        logits[ids] = after.masked_fill_(before == -math.inf, -math.inf)


def _penalises(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    )


def _ids(tokens: Collection[int], logits: torch.Tensor) -> torch.Tensor:
    """[n] int64: those of the tokens that logits ([rows, vocabulary]) have a place for, in their order."""
    ids = torch.from_numpy(np.fromiter(tokens, dtype=np.int64, count=len(tokens)))
    return ids[ids < logits.shape[1]].to(logits.device)


def _counts(tokens: Collection[int], logits: torch.Tensor) -> torch.Tensor:
    """[vocabulary] int64: how many of the tokens are each id of logits ([rows, vocabulary])."""
    return torch.bincount(_ids(tokens, logits), minlength=logits.shape[1])


def _largest(values: torch.Tensor, count: int, *, above: float) -> list[tuple[int, float]]:
    """Ids and values of the `count` largest of [vocabulary] values, of those above a bound; ties by id.

    Which of tied values `topk` finds isn't said, so it is asked for more until the last of them isn't tied.
    """
    if count == 0:
        return []
    size = count + 1
    while True:
        found, ids = (part.tolist() for part in torch.topk(values, min(size, len(values))))
        if size >= len(values) or found[-1] <= above or found[-1] < found[count - 1]:
            break
        size *= 16
    falling = sorted((-value, token) for value, token in zip(found, ids, strict=True) if value > above)
    return [(token, -negative) for negative, token in falling[:count]]


def _log(probability: float) -> float:
    return math.log(probability) if probability else -math.inf
