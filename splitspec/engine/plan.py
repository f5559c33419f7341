"""A ragged batch as tiles: which rows of a pass see which tokens of which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from splitspec.engine.blocks import BlockPool
from splitspec.engine.feed import Feed

#: Rows that the library's fused attention takes at once; more when there are more.
_CUTS = (32, 64, 256)


@dataclass(frozen=True, slots=True)
class Span:
    """One session in the batch: rows `start` on, `base` tokens before them, and the table of its blocks."""

    start: int
    base: int
    depths: npt.NDArray[np.int64]
    #: [rows, rows]: whether a row sees another one of the pass.
    sees: npt.NDArray[np.bool_]
    table: Sequence[int]

    @classmethod
    def of(cls, feed: Feed, start: int, table: Sequence[int]) -> Span:
        count = len(feed.token_ids)
        if not feed.parents:
            sees = np.tri(count, dtype=bool)
        else:
            sees = np.eye(count, dtype=bool)
            for child, parent in enumerate(feed.parents, start=1):
                sees[child] |= sees[parent]
        return cls(start, feed.kv.length, np.asarray(feed.depths()), sees, table)

    @property
    def num_rows(self) -> int:
        return len(self.depths)

    def first_block(self, block_size: int, window: int | None) -> int:
        """Place in the table of the first block that a row sees."""
        if window is None:
            return 0
        return max(0, self.base + int(self.depths.min()) + 1 - window) // block_size

    def num_blocks(self, block_size: int) -> int:
        """Of the table, up to the last row's."""
        return -(-(self.base + self.num_rows) // block_size)

    def slots(self, block_size: int) -> npt.NDArray[np.int64]:
        """[2, rows]: block and place in it of each row."""
        blocks, offsets = np.divmod(np.arange(self.base, self.base + self.num_rows), block_size)
        return np.stack([np.asarray(self.table)[blocks], offsets])

    def mask(self, rows: slice, first: int, last: int, window: int | None) -> npt.NDArray[np.bool_]:
        """[rows, last - first]: which of the keys from `first` to `last` some rows see."""
        keys = np.arange(first, last)
        position = self.base + self.depths[rows, None]
        fed = keys - self.base
        inside = (fed >= 0) & (fed < self.num_rows)
        visible = np.broadcast_to(fed < 0, (len(position), len(keys))).copy()
        visible[:, inside] = self.sees[rows, fed[inside]]
        if window is not None:
            keys = np.where(inside, self.base + self.depths[np.clip(fed, 0, self.num_rows - 1)], keys)
            visible &= keys > position - window
        return visible


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """The rows of one session in a pass with the blocks that they may see.

    rows: [positions] of the pass; padded with the last one. bias: [heads that share a key * positions, keys]
    0 where a row sees a key, else minus infinity. blocks: their ids, or None when they are `num_blocks` side
    by side from `first` on.
    """

    num_rows: int
    rows: torch.Tensor
    bias: torch.Tensor
    first: int
    num_blocks: int
    blocks: torch.Tensor | None

    def of(self, held: torch.Tensor) -> torch.Tensor:
        """held: [blocks, tokens, KV heads, size], of a layer; returns [KV heads, keys, size]."""
        if self.blocks is None:
            seen = held.narrow(0, self.first, self.num_blocks)
        else:
            seen = held.index_select(0, self.blocks)
        return seen.flatten(0, 1).transpose(0, 1)


def tiles(
    spans: Sequence[Span],
    pool: BlockPool,
    *,
    fewest_rows: int,
    queries_per_key: int,
    window: int | None,
) -> list[Tile]:
    """fewest_rows: of a product. queries_per_key: query heads that share a KV head, and so a product.
    window: how many positions back a row sees, its own included; None for all.
    """
    return [_tile(span, pool, fewest_rows, queries_per_key, window) for span in spans]


def _tile(span: Span, pool: BlockPool, fewest_rows: int, queries_per_key: int, window: int | None) -> Tile:
    size, count = pool.block_size, span.num_rows
    first = span.first_block(size, window)
    table = np.asarray(span.table[first : span.num_blocks(size)])
    rows = np.minimum(np.arange(_padded(count, fewest_rows, queries_per_key)), count - 1)
    sees = span.mask(slice(0, count), first * size, (first + len(table)) * size, window)
    sees = np.tile(sees[rows], (queries_per_key, 1))
    bias = torch.zeros(sees.shape, dtype=pool.dtype).masked_fill_(torch.from_numpy(~sees), -torch.inf)
    adjacent = bool((np.diff(table) == 1).all())
    return Tile(
        num_rows=count,
        rows=to_device(span.start + rows, pool.device),
        bias=bias.to(pool.device),
        first=int(table[0]),
        num_blocks=len(table),
        blocks=None if adjacent else to_device(table, pool.device),
    )


def _padded(count: int, fewest_rows: int, queries_per_key: int) -> int:
    """Positions from `count` on that leave no small rest of rows wherever a product is cut."""
    while any(0 < count * queries_per_key % cut < fewest_rows for cut in _CUTS):
        count += 1
    return count


def twice_if_single(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What every layer, the head too, gets in place of a single row."""
    return rows.repeat(2) if len(rows) == 1 else rows


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array there, without waiting for what the device still has to do."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
