"""Attention over the paged pool, in place of the library's own.

Sums run over products of constant shape and over blocks in ascending order, so that a row's result has the
same bits whatever else is in the pass (see plan.py; the partial softmax is that of Dao et al., 2205.14135,
with the row's maximum known before).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from splitspec.engine.blocks import BlockPool, LayerShape
from splitspec.engine.plan import Plan, Span, TileGroup, plan

NAME = "splitspec"
#: Products of fewer multiplications take a kernel of torch's own, and so do in half precision all products
#: of a call when they come to no more than the second figure.
_SMALLEST_PRODUCT = 400
_SMALLEST_BATCH = 16**3


class RaggedPass:
    """What every layer of one pass needs: the rows, where they go, and the plan for each window."""

    def __init__(
        self, pool: BlockPool, spans: Sequence[Span], *, queries_per_key: int, dtype: torch.dtype
    ) -> None:
        self.pool = pool
        self._spans = spans
        self._queries_per_key = queries_per_key
        self._smallest_tile = -(-_fewest_rows(pool.shapes, pool.block_size, dtype) // queries_per_key)
        self._dtype = dtype
        self._plans: dict[int | None, Plan] = {}
        self._device = pool.device
        #: [rows] each: the block that a row's key and value go to, and the place in it.
        slots = np.concatenate([span.slots(pool.block_size) for span in spans], axis=1)
        self.blocks, self.offsets = torch.from_numpy(slots).to(self._device)
        self.num_rows = slots.shape[1]

    def plan(self, window: int | None) -> Plan:
        if window not in self._plans:
            self._plans[window] = plan(
                self._spans,
                block_size=self.pool.block_size,
                smallest_tile=self._smallest_tile,
                queries_per_key=self._queries_per_key,
                window=window,
                dtype=self._dtype,
                device=self._device,
            )
        return self._plans[window]


def _fewest_rows(shapes: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """From how many rows on a product's sums have one order, on a CPU.

    Measured in float32: below 3, 6 and 11 rows at head sizes 64, 128 and 256 other kernels are taken.
    """
    fewest = 8
    for shape in shapes:
        size = min(shape.key_size, shape.value_size)
        fewest = max(fewest, max(shape.key_size, shape.value_size) // 16)
        fewest = max(fewest, -(-_SMALLEST_PRODUCT // (block_size * size)))
        if dtype != torch.float32:
            fewest = max(fewest, _SMALLEST_BATCH // (block_size * size * shape.num_kv_heads) + 1)
    return fewest


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    ragged: RaggedPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **checked: Any,
) -> tuple[torch.Tensor, None]:
    """Write the pass's keys and values to the pool and attend to all that each row sees.

    query [1, heads, rows, key size], key and value [1, KV heads, rows, size]; returns
    [1, rows, heads, value size]. Rows behind those of the plan are padding. checked: what the probe has seen
    to be without effect.
    """
    keys, values = ragged.pool.keys[module.layer_idx], ragged.pool.values[module.layer_idx]
    for held, fed in ((keys, key), (values, value)):
        held[ragged.blocks, :, ragged.offsets] = fed[0].transpose(0, 1)[: ragged.num_rows]
    found = ragged.plan(sliding_window)
    scaled = query[0].transpose(0, 1) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    parts = [_attend(group, scaled, keys, values, softcap) for group in found.groups]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows.index_select(0, found.places).unsqueeze(0), None


def _attend(
    group: TileGroup,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softcap: float | None,
) -> torch.Tensor:
    """query [rows, heads, key size] and a layer of the pool to [tiles * positions, heads, value size]."""
    num_rows, num_heads, key_size = query.shape
    num_pairs, positions = group.rows.shape
    _, num_kv_heads, block_size, value_size = values.shape
    keys = keys.index_select(0, group.blocks).view(-1, block_size, key_size)
    values = values.index_select(0, group.blocks).view(-1, block_size, value_size)
    tiles = query.view(num_rows, num_kv_heads, -1, key_size)[group.rows]
    tiles = tiles.transpose(1, 2).reshape(num_pairs * num_kv_heads, -1, key_size)

    scores = torch.bmm(tiles, keys.transpose(1, 2))
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.view(num_pairs, num_kv_heads, positions, -1, block_size).add_(group.bias)
    scores = scores.view(num_pairs, -1, block_size)
    if len(group.counts) == num_pairs:  # a single tile
        highest = scores.amax((0, 2), keepdim=True)
    else:
        highest = _maximum(group, scores.amax(2, keepdim=True)).index_select(0, group.tiles)
    weights = scores.sub_(highest).exp_()
    outputs = torch.bmm(weights.view(num_pairs * num_kv_heads, -1, block_size), values)
    sums = weights.sum(2, keepdim=True, dtype=torch.float32)
    # With the output of each pair the sum of its weights, so that both are added up at once.
    added = _ordered_sum(group, torch.cat([outputs.view(num_pairs, -1, value_size).float(), sums], dim=2))
    rows = added.narrow(2, 0, value_size) / added.narrow(2, value_size, 1)
    rows = rows.to(query.dtype).view(-1, num_kv_heads, positions, num_heads // num_kv_heads, value_size)
    return rows.transpose(1, 2).reshape(-1, num_heads, value_size)


def _maximum(group: TileGroup, pairs: torch.Tensor) -> torch.Tensor:
    """[pairs, ...] to [tiles, ...]."""
    first, *rest = torch.split(pairs, group.counts)
    for count, part in zip(group.counts[1:], rest, strict=True):
        top = first.narrow(0, 0, count)
        torch.maximum(top, part, out=top)
    return first


def _ordered_sum(group: TileGroup, pairs: torch.Tensor) -> torch.Tensor:
    """[pairs, ...] to [tiles, ...], added block by block in ascending order; in place of the first ones."""
    first, *rest = torch.split(pairs, group.counts)
    for count, part in zip(group.counts[1:], rest, strict=True):
        first.narrow(0, 0, count).add_(part)
    return first


AttentionInterface.register(NAME, paged_attention)
