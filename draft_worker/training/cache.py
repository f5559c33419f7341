"""The target's features of the training data, computed once and kept on disk."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draft_worker.training.data import Example
from draft_worker.training.target import Teacher

_ROWS_PER_SHARD = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded examples. Behind an example's length everything is zero.

    token_ids [batch, length]; features [batch, length, layers, hidden]; hidden [batch, length, hidden], the
    target's final hidden states; lengths, answer_starts, temperatures: [batch].
    """

    token_ids: torch.Tensor
    features: torch.Tensor
    hidden: torch.Tensor
    lengths: torch.Tensor
    answer_starts: torch.Tensor
    temperatures: torch.Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """Where an example lies: tokens start to stop of a shard. answer_start: counted from its first token."""

    shard: Path
    start: int
    stop: int
    answer_start: int
    temperature: float
    is_validation: bool

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def num_answer_tokens(self) -> int:
        return self.length - self.answer_start


class FeatureCache:
    """Shards of `_ROWS_PER_SHARD` examples each, in the order of the data.

    A shard is named by a hash of its examples and of the target, so that data that grew only adds shards
    and other data or another target finds none.
    """

    def __init__(self, directory: Path, identity: str) -> None:
        self._directory = directory
        self._identity = identity
        directory.mkdir(parents=True, exist_ok=True)

    def rows(
        self,
        examples: Iterable[Example],
        teacher: Teacher,
        tokens_per_pass: int,
        progress: Callable[[int], None],
    ) -> list[Row]:
        """Rows of all examples; what the cache lacks is computed. progress: called with the examples done."""
        rows: list[Row] = []
        for group in _groups(examples):
            path = self._directory / f"{self._key(group)}.safetensors"
            if not path.exists():
                _write(path, _compute(group, teacher, tokens_per_pass))
            start = 0
            for example in group:
                stop = start + len(example.token_ids)
                rows.append(
                    Row(path, start, stop, example.answer_start, example.temperature, example.is_validation)
                )
                start = stop
            progress(len(rows))
        return rows

    def _key(self, group: Sequence[Example]) -> str:
        content = json.dumps(
            [self._identity, [[example.token_ids, example.answer_start] for example in group]]
        )
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def _groups(examples: Iterable[Example]) -> Iterator[list[Example]]:
    iterator = iter(examples)
    while group := list(itertools.islice(iterator, _ROWS_PER_SHARD)):
        yield group


@torch.inference_mode()
def _compute(group: Sequence[Example], teacher: Teacher, tokens_per_pass: int) -> dict[str, torch.Tensor]:
    """Tensors of a shard; texts of like length go through the target together."""
    order = sorted(range(len(group)), key=lambda index: len(group[index].token_ids))
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    while order:
        longest = len(group[order[-1]].token_ids)
        taken, order = (
            order[-max(1, tokens_per_pass // longest) :],
            order[: -max(1, tokens_per_pass // longest)],
        )
        ids = torch.zeros(len(taken), longest, dtype=torch.int64)
        for place, index in enumerate(taken):
            ids[place, : len(group[index].token_ids)] = torch.tensor(group[index].token_ids)
        features, hidden = teacher.run(ids.to(teacher.model.device))
        for place, index in enumerate(taken):
            length = len(group[index].token_ids)
            found[index] = (features[place, :length].clone(), hidden[place, :length].clone())
    features = torch.cat([found[index][0] for index in range(len(group))])
    hidden = torch.cat([found[index][1] for index in range(len(group))])
    ids = torch.tensor([token for example in group for token in example.token_ids], dtype=torch.int32)
    return {
        "token_ids": ids,
        "features": features.to("cpu", torch.bfloat16),
        "hidden": hidden.to("cpu", torch.bfloat16),
    }


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    unfinished = path.with_suffix(".part")
    save_file(tensors, unfinished)
    unfinished.rename(path)


def load_batch(rows: Sequence[Row], device: torch.device) -> Batch:
    """Read and pad."""
    pieces: list[dict[str, Any]] = []
    for row in rows:
        with safe_open(row.shard, framework="pt") as shard:
            names = ("token_ids", "features", "hidden")
            pieces.append({name: shard.get_slice(name)[row.start : row.stop] for name in names})

    def padded(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([piece[name] for piece in pieces], batch_first=True).to(device)

    return Batch(
        token_ids=padded("token_ids").long(),
        features=padded("features"),
        hidden=padded("hidden"),
        lengths=torch.tensor([row.length for row in rows], device=device),
        answer_starts=torch.tensor([row.answer_start for row in rows], device=device),
        temperatures=torch.tensor([row.temperature for row in rows], device=device),
    )
