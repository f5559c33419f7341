"""Distillation of an independent draft: DistillSpec (2310.08461)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from draft_worker.training.acceptance import Acceptance
from draft_worker.training.cache import Batch, Row, load_batch
from draft_worker.training.losses import DIVERGENCES
from draft_worker.training.target import Teacher

JUDGED_DEPTH = 5
#: Beside the weights a draft's directory has what makes its vocabulary the target's.
_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


class DistillTask:
    """A small model in training (see `loop.Task`).

    divergence: a name in `losses.DIVERGENCES`. on_policy_share: the share of batches whose answers the
    draft itself writes, to the data's prompts, and the target judges.
    """

    def __init__(
        self, student: PreTrainedModel, teacher: Teacher, divergence: str, on_policy_share: float
    ) -> None:
        self._student = student
        self._teacher = teacher
        self._divergence = DIVERGENCES[divergence]
        self._on_policy_share = on_policy_share

    @property
    def module(self) -> nn.Module:
        return self._student

    def save(self, directory: Path) -> None:
        """An ordinary model directory in bfloat16, as the `model` drafter loads it."""
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in self._student.state_dict().items()}
        self._student.config.dtype = torch.bfloat16
        self._student.save_pretrained(directory, state_dict=weights)
        for name in _COPIED:
            if (self._teacher.directory / name).exists():
                shutil.copyfile(self._teacher.directory / name, directory / name)

    def loss(self, rows: Sequence[Row]) -> torch.Tensor:
        """Mean divergence over the answers' positions."""
        batch = load_batch(rows, self._device)
        if self._on_policy_share and float(torch.rand(())) < self._on_policy_share:
            batch = self.rewritten(batch)
        texts, places = answer_places(batch)
        with self._autocast:
            hidden = self._student.base_model(batch.token_ids, use_cache=False).last_hidden_state
            ours = self._student.get_output_embeddings()(hidden[texts, places])  # type: ignore[no-untyped-call]
            theirs = self._teacher.head(batch.hidden[texts, places])
        return self._divergence(theirs.float(), ours.float()).mean()

    @torch.no_grad()
    def rewritten(self, batch: Batch) -> Batch:
        """The batch's prompts with answers that the student samples, of the same length or shorter."""
        ids = batch.token_ids.clone()
        written = torch.arange(ids.shape[1], device=ids.device) < batch.answer_starts[:, None]
        first = int(batch.answer_starts.min())
        with self._autocast:
            cache = DynamicCache(config=self._student.config)
            fed = ids[:, :first]
            for place in range(first, ids.shape[1]):
                logits = self._student(fed, cache=cache, logits_to_keep=1).logits[:, -1]
                drawn = torch.multinomial(logits.float().softmax(dim=-1), 1)[:, 0]
                ids[:, place] = torch.where(written[:, place], ids[:, place], drawn)
                fed = ids[:, place, None]
            _, hidden = self._teacher.run(ids)
        return Batch(ids, batch.features, hidden, batch.lengths, batch.answer_starts, batch.temperatures)

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row]) -> dict[str, float]:
        """Acceptance over chains of JUDGED_DEPTH draft tokens from every position of the answers."""
        acceptance = Acceptance(JUDGED_DEPTH)
        for row in rows:
            batch = load_batch([row], self._device)
            with self._autocast:
                ours = self._student(batch.token_ids, use_cache=False).logits[0].float()
                theirs = self._teacher.head(batch.hidden[0]).float()
            _, places = answer_places(batch)
            anchors = places[: max(0, len(places) - JUDGED_DEPTH + 1)]
            acceptance.add(
                [theirs[anchors + step] for step in range(JUDGED_DEPTH)],
                [ours[anchors + step] for step in range(JUDGED_DEPTH)],
                None,
                greedy=row.temperature == 0,
            )
        return acceptance.figures()

    @property
    def _device(self) -> torch.device:
        return self._student.device

    @property
    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16)


def answer_places(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts and positions whose logits are for a token of the answer, or for what would come behind it."""
    places = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    inside = (places >= batch.answer_starts[:, None] - 1) & (places < batch.lengths[:, None])
    texts, found = inside.nonzero(as_tuple=True)
    return texts, found
