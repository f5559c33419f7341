"""The target's own checkpoint with some layers left out as drafter (2309.08168); nothing is trained."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

from draft_worker.drafters.base import Kind, Loading
from draft_worker.drafters.model import ModelDrafter
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.loading import count_layers
from splitspec.errors import ConfigError
from splitspec.models import resolve_model


def middle_layers(count: int) -> list[int]:
    """A sixth of the layers, at least one, side by side in the middle.

    On a model of 30 layers that was tried, such a block left the greedy choice as it was for 3 of 5
    tokens, and as many layers spread over the middle half for less than half of them.
    """
    skipped = max(1, count // 6)
    start = (count - skipped + 1) // 2
    return list(range(start, start + skipped))


def _layers(text: str) -> list[int]:
    parts = text.split("+")
    if not all(part.isdecimal() for part in parts):
        raise ValueError("layer numbers, counted from 0, such as 10+12+14")
    return sorted({int(part) for part in parts})


def _build(
    name: str, checkpoint: str, loading: Loading, *, skip: Collection[int] | None = None
) -> ModelDrafter:
    directory = resolve_model(checkpoint)
    count = count_layers(directory, checkpoint)
    skip = middle_layers(count) if skip is None else skip
    keep = [index for index in range(count) if index not in skip]
    if not keep or max(skip) >= count:
        raise ConfigError(
            f"drafters: layer_skip has skip {'+'.join(map(str, skip))}, expected some but not all of the "
            f"layers 0 to {count - 1} of {checkpoint}",
            field="drafters",
        )
    model = CausalLM.load(directory, name=checkpoint, keep_layers=keep, **asdict(loading))
    return ModelDrafter(model, name, "layer_skip")


KIND = Kind(_build, has_checkpoint=True, options={"skip": _layers})
