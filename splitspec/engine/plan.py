"""A ragged batch as products of constant shape: which queries meet which blocks, in which order.

Queries are cut into tiles of some positions of one session, keys into blocks of the pool. A pair is one
tile with one block that it may see. All products of a pass run over its pairs at once, so nothing is
padded to the longest session, and a row's numbers don't depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from splitspec.engine.feed import LONGEST_SHORT_FEED, Feed

#: Positions of the tiles of long feeds.
_LONG_TILE = 64


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


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles of one size, those with most blocks first, and their pairs in the order of their blocks.

    So the pairs with their tile's first block come first, one for each tile; then those with the second,
    for as many of the first tiles as have one; and so on. Sums over the blocks of all tiles are then sums
    of slices, in ascending order.
    """

    #: [pairs]: block id, and which tile.
    blocks: torch.Tensor
    tiles: torch.Tensor
    #: [pairs, positions]: row of the pass. A tile with room left repeats its last row.
    rows: torch.Tensor
    #: [pairs, 1, positions, 1, keys]: 0 where a row sees a key, else minus infinity.
    bias: torch.Tensor
    #: For each place in the order of blocks, how many tiles have so many.
    counts: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """The groups, and where each row of the pass is in their tiles, one group after the other: [rows].

    A pass of a single row has it twice: alone it would take other kernels.
    """

    groups: list[TileGroup]
    places: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    span: Span
    rows: slice
    first_block: int
    num_blocks: int


def plan(
    spans: Sequence[Span],
    *,
    block_size: int,
    smallest_tile: int,
    queries_per_key: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """smallest_tile: positions. queries_per_key: query heads that share a KV head, and so a product.
    window: how many positions back a row sees, its own included; None for all.
    """
    tiles: dict[int, list[_Tile]] = {}
    for span in spans:
        if span.num_rows > LONGEST_SHORT_FEED:
            size = _LONG_TILE
        else:
            most = max(smallest_tile, LONGEST_SHORT_FEED // queries_per_key)
            size = min(max(smallest_tile, 1 << (span.num_rows - 1).bit_length()), most)
        tiles.setdefault(size, []).extend(_tiles(span, size, block_size, window))
    groups = []
    places = np.empty(sum(span.num_rows for span in spans), dtype=np.int64)
    taken = 0
    for size, members in tiles.items():
        members.sort(key=lambda tile: -tile.num_blocks)
        for index, tile in enumerate(members):
            start = taken + index * size
            count = tile.rows.stop - tile.rows.start
            places[tile.span.start + tile.rows.start : tile.span.start + tile.rows.stop] = np.arange(
                start, start + count
            )
        taken += len(members) * size
        groups.append(_group(members, size, block_size, window, dtype, device))
    return Plan(groups, torch.from_numpy(twice_if_single(places)).to(device))


def twice_if_single(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What every layer, the head too, gets in place of a single row."""
    return rows.repeat(2) if len(rows) == 1 else rows


def _tiles(span: Span, size: int, block_size: int, window: int | None) -> list[_Tile]:
    tiles = []
    for start in range(0, span.num_rows, size):
        rows = slice(start, min(start + size, span.num_rows))
        # A parent comes before its children, so no row sees a key behind its own.
        end = -(-(span.base + rows.stop) // block_size)
        earliest = span.base + int(span.depths[rows].min())
        first = 0 if window is None else max(0, earliest + 1 - window) // block_size
        tiles.append(_Tile(span, rows, first, end - first))
    return tiles


def _group(
    tiles: list[_Tile],
    size: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> TileGroup:
    """tiles: those with most blocks first."""
    lengths = np.array([tile.num_blocks for tile in tiles])
    counts = (lengths[:, None] > np.arange(lengths[0])).sum(axis=0)
    starts = np.concatenate([[0], np.cumsum(counts)])
    blocks = np.empty(starts[-1], dtype=np.int64)
    owner = np.empty(starts[-1], dtype=np.int64)
    rows = np.empty((starts[-1], size), dtype=np.int64)
    visible = np.empty((starts[-1], size, block_size), dtype=bool)
    for index, tile in enumerate(tiles):
        pairs = starts[: tile.num_blocks] + index
        last_block = tile.first_block + tile.num_blocks
        mask = tile.span.mask(tile.rows, tile.first_block * block_size, last_block * block_size, window)
        repeated = np.minimum(np.arange(size), len(mask) - 1)
        blocks[pairs] = tile.span.table[tile.first_block : last_block]
        owner[pairs] = index
        rows[pairs] = tile.span.start + tile.rows.start + repeated
        by_block = mask[repeated].reshape(size, tile.num_blocks, block_size)
        visible[pairs] = by_block.transpose(1, 0, 2)
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), -torch.inf)
    return TileGroup(
        blocks=torch.from_numpy(blocks).to(device),
        tiles=torch.from_numpy(owner).to(device),
        rows=torch.from_numpy(rows).to(device),
        bias=bias[:, None, :, None].to(device),
        counts=counts.tolist(),
    )
