"""Features: the outputs of chosen decoder layers, kept in the pool beside a token's keys and values.

A draft that continues the target's own hidden states (EAGLE, 2401.15077 and 2503.01840) asks for them. In the
pool they are shared, copied and evicted with the blocks, so they can be had of any token that a KV holds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from splitspec.errors import ConfigError


def parse_feature_layers(text: str, count: int) -> tuple[int, ...]:
    """The layers that a setting means for a model of `count` decoder layers, counted from 0.

    "auto": EAGLE-3's low, middle and high one, of a tiny model those of them that it has. "none", or numbers
    as in "2+15+27". Raises ConfigError for anything else.
    """
    if text == "none":
        return ()
    if text == "auto":
        return tuple(sorted({layer for layer in (2, count // 2, count - 3) if 0 <= layer < count}))
    parts = text.split("+")
    if not all(part.isdecimal() for part in parts):
        raise _wrong(text, "auto, none, or layers such as 2+15+27")
    return tuple(int(part) for part in parts)


def keep_outputs(layers: nn.ModuleList, chosen: Sequence[int]) -> None:
    """Have each pass write the outputs of chosen layers to its pool, in that order. Raises ConfigError."""
    if len(set(chosen)) < len(chosen) or not all(0 <= index < len(layers) for index in chosen):
        shown = "+".join(map(str, chosen))
        raise _wrong(shown, f"different layers of this model's, 0 to {len(layers) - 1}")
    for place, index in enumerate(chosen):
        layers[index].register_forward_hook(functools.partial(_keep, place), with_kwargs=True)


def _keep(place: int, layer: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    """output: [1, rows, hidden size], or a tuple that begins with it."""
    ragged = kwargs["ragged"]
    rows: torch.Tensor = output[0] if isinstance(output, torch.Tensor) else output[0][0]
    ragged.pool.features[ragged.blocks, ragged.offsets, place] = rows[: ragged.num_rows]


def _wrong(value: str, expected: str) -> ConfigError:
    return ConfigError(f"feature_layers is {value!r}, expected {expected}", field="feature_layers")
