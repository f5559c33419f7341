"""Models as tables: a distribution, or logits, for each prefix."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from splitspec.sampling.rows import ProcessedRows, Rows
from splitspec.types import Drawing, Output, Rule, Sampling

Prefix = tuple[int, ...]
#: A model: (emitted tokens, paths of draft tokens after them) to a row for each path.
Model = Callable[[Prefix, tuple[Prefix, ...]], Rows]
#: A distribution ([vocabulary] float64), or logits ([vocabulary] float32), after each prefix.
Table = Callable[[Prefix], torch.Tensor]


@dataclass(frozen=True)
class TableRows:
    """Rows that are distributions already. table: [rows] of [vocabulary] float64."""

    table: Sequence[torch.Tensor]

    def probabilities(self, row: int) -> torch.Tensor:
        return self.table[row]

    def argmax(self, row: int) -> int:
        return int(self.table[row].argmax())


def model(table: Table) -> Model:
    """The model of a table of distributions."""
    return lambda prefix, paths: TableRows([table(prefix + path) for path in paths])


def random_table(vocabulary_size: int, seed: int, allowed: Sequence[int] | None = None) -> Table:
    """Rows of random shape; about a third of the entries are 0. `allowed`: the tokens that may have mass."""
    candidates = np.arange(vocabulary_size) if allowed is None else np.array(allowed)

    @functools.cache
    def row(prefix: Prefix) -> torch.Tensor:
        generator = np.random.default_rng((seed, len(prefix), *prefix))
        weights = generator.gamma(0.7, size=vocabulary_size)
        support = candidates[generator.random(len(candidates)) > 1 / 3]
        if not len(support):
            support = candidates[:1]
        masked = np.zeros(vocabulary_size)
        masked[support] = weights[support]
        return torch.from_numpy(masked / masked.sum())

    return row


def random_model(vocabulary_size: int, seed: int, allowed: Sequence[int] | None = None) -> Model:
    return model(random_table(vocabulary_size, seed, allowed))


def open_at(vocabulary_size: int, seed: int, places: Collection[int]) -> Model:
    """Random rows without zeros behind prefixes of these lengths; behind all others token 0 is certain.

    So an enumeration reaches far, and forks at these places only.
    """
    logits = logits_table(vocabulary_size, seed)

    def row(prefix: Prefix) -> torch.Tensor:
        if len(prefix) in places:
            return torch.softmax(logits(prefix).double(), dim=0)
        return torch.eye(vocabulary_size, dtype=torch.float64)[0]

    return model(row)


def small_scales() -> tuple[Model, Model]:
    """Target and draft of four tokens where the block rule's P_1 is 0.0006, in size between weights of q.

    So the residual's shape depends on that scale.
    """
    p = ([1 - 3e-4, 3e-4, 0, 0], [0.4, 0.3, 0.3, 0.0])
    q = ([0.5, 0.5, 0, 0], [1 - 1e-5, 1e-5, 0, 0])

    def of(rows: Sequence[Sequence[float]]) -> Model:
        return model(lambda prefix: torch.tensor(rows[min(len(prefix), 1)], dtype=torch.float64))

    return of(p), of(q)


def logits_table(vocabulary_size: int, seed: int) -> Table:
    """Random float32 logits, with a tie in each row."""

    @functools.cache
    def row(prefix: Prefix) -> torch.Tensor:
        generator = np.random.default_rng((seed, len(prefix), *prefix))
        logits = generator.normal(scale=2.0, size=vocabulary_size).astype(np.float32)
        logits[generator.integers(vocabulary_size)] = logits[0]
        return torch.from_numpy(logits)

    return row


@dataclass(frozen=True)
class ProcessedModel:
    """Logits after a prompt, through the service's processing of a request's parameters."""

    table: Table
    drawing: Drawing
    prompt: Prefix

    def __call__(self, prefix: Prefix, paths: tuple[Prefix, ...]) -> Rows:
        return _processed(self, prefix, paths)

    def logits(self, prefix: Prefix, paths: tuple[Prefix, ...]) -> torch.Tensor:
        """[rows, vocabulary] float32."""
        return torch.stack([self.table(prefix + path) for path in paths])


@functools.cache
def _processed(model: ProcessedModel, prefix: Prefix, paths: tuple[Prefix, ...]) -> Rows:
    return ProcessedRows(model.logits(prefix, paths), model.drawing, model.prompt + prefix, paths)


def processed_model(
    vocabulary_size: int,
    seed: int,
    sampling: Sampling,
    *,
    prompt: Prefix = (),
    min_tokens: int = 0,
    ending: frozenset[int] = frozenset(),
) -> ProcessedModel:
    """Random logits under a request's parameters."""
    rule = Rule.GREEDY if sampling.greedy else Rule.TOKEN
    drawing = Drawing(dataclasses.replace(sampling, seed=0), rule, Output(len(prompt), min_tokens, ending))
    return ProcessedModel(logits_table(vocabulary_size, seed), drawing, prompt)
