"""KV of one session that can be rewound to any length."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

_GROWTH = 256


class RewindableLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer in buffers of [1, heads, capacity, head size], used up to `length`.

    The library's own layers copy everything that they hold with each pass, and those of sliding windows
    drop what has left the window, so that they can't be rewound past its edge. This one writes in place
    and drops nothing: the window is the mask's matter, and the library makes the mask for whatever
    lengths `get_mask_sizes` tells.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, tokens, head size] of each; all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys = _appended(self.keys, key_states, start)
        self.values = _appended(self.values, value_states, start)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of the keys that a pass over `query_length` tokens sees, and the position of the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def _appended(buffer: torch.Tensor, rows: torch.Tensor, start: int) -> torch.Tensor:
    """The buffer with `rows` written at `start`: the same one, or a longer copy when it is full."""
    end = start + rows.shape[2]
    if end > buffer.shape[2]:
        capacity = -(-end // _GROWTH) * _GROWTH
        grown = buffer.new_empty((*buffer.shape[:2], capacity, buffer.shape[3]))
        grown[:, :, :start] = buffer[:, :, :start]
        buffer = grown
    buffer[:, :, start:end] = rows
    return buffer


class KV:
    """KV of the first `length` tokens of a session; rows behind them are stale and get overwritten."""

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self._layers = [RewindableLayer() for _ in range(num_layers)]
        self._cache = Cache(layers=[*self._layers])

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, including the part that isn't used yet."""
        return sum(layer.num_bytes for layer in self._layers)

    def rewound(self) -> Cache:
        """The library's cache, set to `length` tokens: also after a pass that failed half-way."""
        for layer in self._layers:
            layer.length = self.length
        return self._cache


def unrewindable(config: Any) -> list[str]:
    """Kinds of the library's cache layers for this model that RewindableLayer can't stand in for.

    Full attention and sliding or chunked windows differ by their mask alone. Recurrent states,
    convolutions, layers that share KV and sparse indexers hold other state.
    """
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer})
