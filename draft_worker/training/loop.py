"""The training loop of all drafts: schedule, checkpoints that resume, log."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from draft_worker.training.cache import Row
from splitspec.errors import ConfigError, HandshakeError

_MAX_GRADIENT_NORM = 1.0
_BUCKET = 256
#: Vectors, such as the gains of norms, are of size one: at the learning rate of matrices they'd hardly move.
_VECTOR_PACE = 5.0


class Task(Protocol):
    """What is trained. loss: of one batch, a mean. evaluate: figures over validation rows, by name."""

    @property
    def module(self) -> nn.Module: ...

    def loss(self, rows: Sequence[Row]) -> torch.Tensor: ...

    def evaluate(self, rows: Sequence[Row]) -> dict[str, float]: ...

    def save(self, directory: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """tokens: of answers to train on, all epochs and all runs of the command together. The learning rate is
    constant between a warm-up and the last decay_share of the tokens, in which it falls to zero.
    report_every, evaluate_every: tokens between entries of the log, without and with figures of acceptance.
    """

    tokens: int
    tokens_per_batch: int = 2048
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    decay_share: float = 0.3
    seed: int = 0
    report_every: int = 20_000
    evaluate_every: int = 200_000
    checkpoint_every_s: float = 300.0

    def rate(self, step: int, tokens: int) -> float:
        """Learning rate of a step, `tokens` of training before it."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        left = max(0.0, 1 - tokens / self.tokens)
        return self.learning_rate * warm * min(1.0, left / self.decay_share)


@dataclass(slots=True)
class Progress:
    """Where a run is: batches of the current epoch, steps, tokens of answers and seconds of training."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Training:
    """A task and where its training is; `directory` holds the draft, `state.pt` and `log.jsonl`.

    A directory with a state is resumed: the weights at the end are those of a run without a break.
    target_hash: of the target's weights; the state of a training for another one is refused.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        directory: Path,
        training: Sequence[Row],
        validation: Sequence[Row],
        target_hash: str,
        report: Callable[[dict[str, float]], None],
    ) -> None:
        if not training or not validation:
            raise ConfigError(
                f"data has {len(training)} examples to train on and {len(validation)} to validate on, "
                f"expected both; one in 32 is for validation",
                field="data",
            )
        self._task = task
        self._plan = plan
        self._directory = directory
        self._training = training
        self._validation = validation
        self._target_hash = target_hash
        self._report = report
        trained = [parameter for parameter in task.module.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in trained if p.ndim > 1], "pace": 1.0},
                {"params": [p for p in trained if p.ndim == 1], "pace": _VECTOR_PACE, "weight_decay": 0.0},
            ],
            lr=plan.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,
        )
        self.progress = Progress()
        directory.mkdir(parents=True, exist_ok=True)
        if self._state_path.exists():
            self._resume()
        else:
            self._log({"tokens": 0, **task.evaluate(validation)})

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Train to the end of the plan, or until `stopped` says so; either way a checkpoint is written."""
        saved = started = time.monotonic()
        seconds = self.progress.seconds
        loss = 0.0
        while self.progress.tokens < self._plan.tokens and not stopped():
            batches = make_batches(
                self._training, self._plan.tokens_per_batch, self._plan.seed + self.progress.epoch
            )
            for rows in batches[self.progress.batch :]:
                before = self.progress.tokens
                loss += (self._step(rows) - loss) * (0.02 if loss else 1.0)
                self.progress.seconds = seconds + time.monotonic() - started
                if self._passed(before, self._plan.evaluate_every):
                    self._log({"loss": loss, **self._figures(), **self._task.evaluate(self._validation)})
                elif self._passed(before, self._plan.report_every):
                    self._log({"loss": loss, **self._figures()})
                if time.monotonic() - saved > self._plan.checkpoint_every_s:
                    self.save()
                    saved = time.monotonic()
                if self.progress.tokens >= self._plan.tokens or stopped():
                    break
            else:
                self.progress.epoch += 1
                self.progress.batch = 0
        self.save()
        if self.progress.tokens < self._plan.tokens:
            self._log({"loss": loss, **self._figures()})
        else:
            self._log({"loss": loss, **self._figures(), **self._task.evaluate(self._validation)})

    def _passed(self, before: int, every: int) -> bool:
        """Whether the last step's tokens passed a multiple of `every`."""
        return self.progress.tokens // every > before // every

    def _step(self, rows: Sequence[Row]) -> float:
        rate = self._plan.rate(self.progress.step, self.progress.tokens)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["pace"]
        loss = self._task.loss(rows)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._task.module.parameters(), _MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.progress.step += 1
        self.progress.batch += 1
        self.progress.tokens += sum(row.num_answer_tokens for row in rows)
        return loss.item()

    def _figures(self) -> dict[str, float]:
        return {
            **asdict(self.progress),
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "tokens_per_second": self.progress.tokens / max(self.progress.seconds, 1e-9),
        }

    def _log(self, figures: dict[str, float]) -> None:
        rounded = {
            name: float(f"{value:.5g}") if isinstance(value, float) else value
            for name, value in figures.items()
        }
        with (self._directory / "log.jsonl").open("a") as file:
            file.write(json.dumps(rounded) + "\n")
        self._report(rounded)

    @property
    def _state_path(self) -> Path:
        return self._directory / "state.pt"

    def save(self) -> None:
        """Write the draft and the state to resume from; a crash leaves the old state or the new."""
        self._task.save(self._directory)
        state = {
            "weights": self._task.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self.progress),
            "examples": len(self._training),
            "target": self._target_hash,
            "random": torch.get_rng_state(),
        }
        unfinished = self._state_path.with_suffix(".part")
        torch.save(state, unfinished)
        os.replace(unfinished, self._state_path)

    def _resume(self) -> None:
        try:
            state: dict[str, Any] = torch.load(self._state_path, weights_only=True)
            self._task.module.load_state_dict(state["weights"])
        except Exception as error:  # the library raises nothing more specific
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"out is {str(self._directory)!r}, expected a directory without a training state or with one "
                f"of the same draft ({reason})",
                field="out",
            ) from error
        if state["target"] != self._target_hash:
            raise HandshakeError(
                f"out is {str(self._directory)!r}, a training for the target with the weights hash "
                f"{state['target']}, expected one for {self._target_hash}",
                field="out",
            )
        self._optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        torch.set_rng_state(state["random"])
        if state["examples"] != len(self._training):
            # Other data is another order: the epoch begins anew.
            self.progress.epoch += 1
            self.progress.batch = 0


def make_batches(rows: Sequence[Row], tokens_per_batch: int, seed: int) -> list[list[Row]]:
    """All rows once, in a random order that `seed` gives; a batch has rows of like length and, padded, at
    most so many tokens, or one row.
    """
    generator = random.Random(seed)
    order = list(rows)
    generator.shuffle(order)
    batches: list[list[Row]] = []
    for start in range(0, len(order), _BUCKET):
        bucket = sorted(order[start : start + _BUCKET], key=lambda row: row.length)
        batch: list[Row] = []
        for row in bucket:
            if batch and (len(batch) + 1) * row.length > tokens_per_batch:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)
    generator.shuffle(batches)
    return batches
