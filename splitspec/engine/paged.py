"""What every model with paged KV offers to the workers, whatever computes its logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from protos.v1 import common_pb2
from splitspec.engine.batch import Batch
from splitspec.engine.blocks import BlockPool
from splitspec.engine.feed import Feed, Reservation
from splitspec.engine.kv import KV

BLOCK_SIZE = 64


class PagedLM(ABC):
    """A language model whose sessions' KV lies in the blocks of a pool. One thread runs all passes."""

    def __init__(self, info: common_pb2.ModelInfo, pool: BlockPool) -> None:
        """info.max_context: the model's own; it becomes what the pool has room for when that is less."""
        info.kv_tokens = pool.num_tokens
        info.max_context = min(info.max_context, info.kv_tokens)
        self.info = info
        self.pool = pool

    def new_kv(self, tenant: str = "", token_ids: Sequence[int] = ()) -> KV:
        """An empty KV, or one of as much of a text as final blocks of the same tenant's sessions hold."""
        kv = KV(self.pool, tenant)
        kv.adopt(token_ids)
        return kv

    def features(self, kv: KV, start: int, stop: int) -> torch.Tensor:
        """[stop - start, layers, hidden size] in the model's dtype: outputs of info.feature_layers, tokens
        `start` to `stop` of those that the KV holds. Raises ValueError for others, and for a tree's.
        """
        held = kv.length - kv.num_tree_tokens
        if not 0 <= start <= stop <= held:
            raise ValueError(f"features of tokens {start} to {stop}, expected 0 to {held} in order")
        blocks, offsets = kv.slots(range(start, stop))
        return self.pool.features[blocks, offsets]

    def forward(self, kv: KV, token_ids: Sequence[int], num_rows: int) -> torch.Tensor:
        """`forward_batch` of a single chain."""
        return self.forward_batch([Feed(kv, token_ids, num_rows)])[0]

    @torch.inference_mode()
    def forward_batch(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Feed each session's tokens behind those that its KV holds, in one pass.

        Returns for each feed [num_rows, vocabulary] float32, the logits of the last num_rows tokens; a row
        conditions on all tokens up to its own, in a tree on its ancestors. num_rows 0 only feeds. Raises
        ValueError for a feed that makes no sense (see Feed.check) or a KV fed twice, and OverloadedError
        when the pool has no room. After any error every KV is as before.
        """
        if len({id(feed.kv) for feed in feeds}) < len(feeds):
            raise ValueError("a KV is fed twice in one pass")
        for feed in feeds:
            feed.check(self.info.vocabulary_size, self.info.max_context)
        if not feeds:
            return []
        reservation = Reservation(self.pool, feeds)
        try:
            logits = self.lead(Batch.of(feeds, reservation.tables))
        except BaseException:
            reservation.undo()
            raise
        reservation.commit()
        return list(torch.split(logits, [feed.num_rows for feed in feeds]))

    def lead(self, batch: Batch) -> torch.Tensor:
        """`run`, in every process that has a share of the model."""
        return self.run(batch)

    @abstractmethod
    def run(self, batch: Batch) -> torch.Tensor:
        """[wanted rows, vocabulary] float32 logits. Writes through the tables, and keeps no account."""
