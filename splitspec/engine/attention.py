"""Attention over the paged pool, in place of the library's own: on a GPU all sessions at once (flex.py), else
one after the other.

A session's blocks mostly lie side by side in the pool, so that its keys and values are views of it; else they
are gathered. Rows are padded to shapes whose sums have one order, so that a row's result has the same bits
whatever else is in the pass: see `fewest_rows` and `_UNIT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface

from splitspec.engine import threads
from splitspec.engine.blocks import BlockPool
from splitspec.engine.flex import FlexPlan, attend
from splitspec.engine.plan import Span, Tile, tiles, to_device

NAME = "splitspec"
#: Values are summed over so many keys at once. Measured in float32: sums over up to 384 have one order on an
#: Intel Xeon, over fewer than 192 on an AMD EPYC. The self-test looks whether these have it here.
_UNIT = 128
#: Columns that leave rows aligned, which a product's sums depend on.
_ALIGNED = 16
#: Products of fewer multiplications take a kernel of torch's own, and so do in half precision all products
#: of a call when they come to no more than the second figure.
_SMALLEST_PRODUCT = 400
_SMALLEST_BATCH = 16**3


class RaggedPass:
    """What every layer of one pass needs: the rows, where they go, and the plans for each kind of layer.

    flex: attend to all sessions at once; by default on a GPU.
    """

    def __init__(self, pool: BlockPool, spans: Sequence[Span], *, flex: bool | None = None) -> None:
        self.pool = pool
        self.flex = pool.device.type != "cpu" if flex is None else flex
        self._spans = spans
        self._tiles: dict[tuple[int | None, int], list[Tile]] = {}
        self._plans: dict[int | None, FlexPlan] = {}
        #: [rows] each: the block that a row's key and value go to, and the place in it.
        slots = np.concatenate([span.slots(pool.block_size) for span in spans], axis=1)
        self.blocks, self.offsets = to_device(slots, pool.device)
        self.num_rows = slots.shape[1]

    def tiles(self, window: int | None, queries_per_key: int) -> list[Tile]:
        """One for each span: see `plan.tiles`."""
        kind = (window, queries_per_key)
        if kind not in self._tiles:
            self._tiles[kind] = tiles(
                self._spans,
                self.pool,
                fewest_rows=fewest_rows(self.pool),
                queries_per_key=queries_per_key,
                window=window,
            )
        return self._tiles[kind]

    def plan(self, window: int | None) -> FlexPlan:
        if window not in self._plans:
            self._plans[window] = FlexPlan(self._spans, self.pool, window)
        return self._plans[window]


def fewest_rows(pool: BlockPool) -> int:
    """From how many rows on a product's sums have one order, on a CPU.

    Measured: in float32 other kernels are taken below 3, 6 and 11 rows at head sizes 64, 128 and 256, in
    bfloat16 for a single row.
    """
    fewest = 8
    for shape in set(pool.shapes):
        fewest = max(fewest, max(shape.key_size, shape.value_size) // 16)
        block = pool.block_size * min(shape.key_size, shape.value_size)
        fewest = max(fewest, -(-_SMALLEST_PRODUCT // block))
        fewest = max(fewest, _SMALLEST_BATCH // (block * shape.num_kv_heads) + 1)
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
    s_aux: torch.Tensor | None = None,
    **checked: Any,
) -> tuple[torch.Tensor, None]:
    """Write the pass's keys and values to the pool and attend to all that each row sees.

    query [1, heads, rows, key size], key and value [1, KV heads, rows, size]; returns
    [1, rows, heads, value size]. s_aux: [heads] attention sinks, each the score of one more key whose value
    is zero. checked: what the probe has seen to be without effect.
    """
    keys, values = ragged.pool.keys[module.layer_idx], ragged.pool.values[module.layer_idx]
    for held, fed in ((keys, key), (values, value)):
        held[ragged.blocks, ragged.offsets] = fed[0].transpose(0, 1)[: ragged.num_rows]
    _, num_heads, num_rows, key_size = query.shape
    num_kv_heads, value_size = values.shape[2:]
    scale = key_size**-0.5 if scaling is None else scaling
    if ragged.flex:
        attended = attend(query, keys, values, ragged.plan(sliding_window), scale, softcap, s_aux)
        return _as_rows(attended, num_rows), None
    sinks = None if s_aux is None else s_aux.view(num_kv_heads, -1, 1)
    parts = []
    for tile in ragged.tiles(sliding_window, num_heads // num_kv_heads):
        rows = query[0].index_select(1, tile.rows).view(num_kv_heads, -1, key_size)
        seen = tile.of(keys), tile.of(values)
        with threads.worth(seen[0].nbytes + seen[1].nbytes, rows.shape[1]):
            result = product(rows, *seen, tile.bias, scale, softcap, sinks)
        parts.append(result.view(num_heads, -1, value_size)[:, : tile.num_rows])
    attended = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return _as_rows(attended, num_rows), None


def _as_rows(attended: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[heads, rows, value size] to [1, rows, heads, value size]; a pass of a single row has it twice."""
    return attended.expand(-1, num_rows, -1).transpose(0, 1).unsqueeze(0).contiguous()


def product(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [KV heads, rows, key size], scaled in place; keys and values [KV heads, keys, size]; bias
    [rows, keys]; sinks [KV heads, query heads of each, 1]. Returns [KV heads, rows, value size].
    """
    # In float32 the library's fused product orders its sums by the number of keys.
    if query.dtype != torch.float32 and softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=bias, scale=scale
        )[0]
    scores = torch.bmm(query.mul_(scale), keys.transpose(1, 2))
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.add_(bias)
    if sinks is not None:
        column = sinks.repeat_interleave(scores.shape[1] // sinks.shape[1], dim=1).to(scores)
        scores = torch.cat([scores, functional.pad(column, (0, _ALIGNED - 1), value=-torch.inf)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    first, *rest = zip(torch.split(weights, _UNIT, dim=2), torch.split(values, _UNIT, dim=1), strict=True)
    result = torch.bmm(*first)
    for unit in rest:
        result.baddbmm_(*unit)
    return result


AttentionInterface.register(NAME, paged_attention)
