"""An EAGLE network on the engine's paged pool: the rows of many sessions in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from draft_worker.eagle.network import EagleNetwork
from protos.v1 import common_pb2
from splitspec.engine.attention import RaggedPass, paged_attention
from splitspec.engine.blocks import BlockPool, LayerShape
from splitspec.engine.feed import Feed, Reservation
from splitspec.engine.kv import KV
from splitspec.engine.linear import Slabs, can_pack, pack_linears
from splitspec.engine.loading import parse_attention
from splitspec.engine.memory import quarter_of_free_memory
from splitspec.engine.paged import BLOCK_SIZE
from splitspec.engine.plan import Span, to_device, twice_if_single
from splitspec.engine.probe import Probe

#: Room for the rows that a session drafts on a text.
_DRAFT_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class EagleFeed(Feed):
    """Rows of the draft's KV. Row i reads the feature of token i and the embedding of token i + 1, which is
    the one in token_ids; it predicts token i + 2.

    features: [tokens, layers, hidden size], the target's, for committed tokens. For draft tokens None, and
    paths: for each the rows of the KV that lead to it, from the last committed row on; it reads the output of
    the last one in place of a feature, and attends to the committed rows and to its path alone.
    """

    features: torch.Tensor | None = None
    paths: Sequence[Sequence[int]] = field(default=())

    #: The target's features are gone by then.
    can_be_fed_again = False

    def cut(self, count: int) -> tuple[Feed, Feed]:
        """See Feed; for committed tokens."""
        assert self.features is not None
        first, rest = Feed.cut(self, count)
        return replace(first, features=self.features[:count]), replace(rest, features=self.features[count:])  # type: ignore[call-arg]

    def check(self, vocabulary_size: int, max_context: int) -> None:
        """See Feed. Rows of a tree stand side by side: there may be more of them than positions."""
        Feed.check(self, vocabulary_size, self.end)
        if len(self.token_ids) != len(self.paths if self.features is None else self.features):
            raise ValueError(f"{len(self.token_ids)} tokens, expected a feature or a path for each")
        if max(self.positions()) >= max_context:
            raise ValueError(f"position {max(self.positions())} is beyond the context of {max_context}")

    def positions(self) -> list[int]:
        if self.features is None:
            return [path[0] + len(path) for path in self.paths]
        return list(range(self.kv.length, self.kv.length + len(self.token_ids)))

    def span(self, start: int, table: Sequence[int]) -> Span:
        """Its rows in the pass: from `start` on."""
        if self.features is not None:
            return Span.of(self, start, table)
        count, held = len(self.token_ids), self.kv.length
        follows = np.zeros((count, held), dtype=bool)
        for row, path in enumerate(self.paths):
            follows[row, : path[0] + 1] = True
            follows[row, list(path)] = True
        depths = np.array(self.positions()) - held
        return _TreeSpan(start, held, depths, np.eye(count, dtype=bool), table, follows)


@dataclass(frozen=True, slots=True)
class _TreeSpan(Span):
    """Rows that see only some of those before them.

    follows: [rows, base] whether a row sees a held one.
    """

    follows: npt.NDArray[np.bool_]

    def mask(self, rows: slice, first: int, last: int, window: int | None) -> npt.NDArray[np.bool_]:
        visible = Span.mask(self, rows, first, last, window)
        held = max(0, min(last, self.base) - first)
        visible[:, :held] &= self.follows[rows, first : first + held]
        return visible


class EagleLM:
    """A drafting network with paged KV: what `CausalLM` is for a whole model.

    A row's output stays in the pool beside its key and value, for the rows that draft on from it. The
    embedding is the target's. Not thread-safe: one thread runs all passes.
    """

    #: Of the only layer, as `paged_attention` asks.
    layer_idx = 0

    def __init__(
        self,
        network: EagleNetwork,
        embedding: torch.Tensor,
        info: common_pb2.ModelInfo,
        *,
        kv_memory_bytes: int | None = None,
        block_size: int = BLOCK_SIZE,
        attention: str = "auto",
    ) -> None:
        """network, embedding ([vocabulary, hidden size]): of one element type, on one device.

        kv_memory_bytes, block_size, attention: see `CausalLM.load`.
        """
        config = network.config
        self.config = config
        self.info = info
        self.pool = BlockPool(
            [LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)],
            memory_bytes=quarter_of_free_memory(embedding.device)
            if kv_memory_bytes is None
            else kv_memory_bytes,
            block_size=block_size,
            dtype=embedding.dtype,
            device=embedding.device,
            feature_layers=1,
            hidden_size=config.hidden_size,
        )
        # Beside a text there have to be its draft rows, those of trees included.
        info.kv_tokens = max(1, self.pool.num_blocks - _DRAFT_ROWS // block_size) * block_size
        info.max_context = min(info.max_context, info.kv_tokens)
        self._flex = parse_attention(attention)
        self._network = network
        self._embedding = embedding
        if can_pack(embedding.dtype, embedding.device):
            joined = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
            siblings: list[list[tuple[nn.Module, str]]] = [
                [(network, name) for name in names] for names in joined
            ]
            # What is drafted never decides what is emitted: rows needn't have the same bits in any batch.
            pack_linears(network, Probe(siblings=siblings), Slabs(needed=False))

    def new_kv(self, tenant: str, first_token: int | None = None) -> KV:
        """An empty KV, of a text from its second token on; what is shared is keyed by the first, too."""
        return KV(self.pool, f"{tenant}\n{first_token}")

    @torch.inference_mode()
    def forward_batch(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Feed each session's rows behind those that its KV holds, in one pass.

        Returns for each feed [num_rows, draft vocabulary] float32, the logits of its last num_rows rows.
        Raises ValueError and OverloadedError as `CausalLM.forward_batch` does, with every KV as before.
        """
        ours = [feed for feed in feeds if isinstance(feed, EagleFeed)]
        if len(ours) < len(feeds) or len({id(feed.kv) for feed in ours}) < len(ours):
            raise ValueError("expected feeds of an EAGLE draft, each with a KV of its own")
        for feed in ours:
            feed.check(len(self._embedding), self.info.max_context)
        if not ours:
            return []
        reservation = Reservation(self.pool, ours)
        try:
            logits = self._run(ours, reservation.tables)
        except BaseException:
            reservation.undo()
            raise
        reservation.commit()
        return logits

    def _run(self, feeds: Sequence[EagleFeed], tables: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        network, device = self._network, self._embedding.device
        spans: list[Span] = []
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for feed, table in zip(feeds, tables, strict=True):
            spans.append(feed.span(len(ids), table))
            ids.extend(feed.token_ids)
            positions.extend(feed.positions())
            wanted.extend(range(len(ids) - feed.num_rows, len(ids)))
        ragged = RaggedPass(self.pool, spans, flex=self._flex)

        def tensor(rows: list[int]) -> torch.Tensor:
            return to_device(twice_if_single(np.array(rows, dtype=np.int64)), device)

        hidden = self._hidden(feeds, tables)
        if len(ids) == 1:
            hidden = hidden.expand(2, -1)
        embeddings = functional.embedding(tensor(ids), self._embedding)
        cos, sin = network.rotary(tensor(positions))
        residual, query, key, value = network.project(embeddings[None], hidden[None], cos, sin)
        attended, _ = paged_attention(self, query, key, value, None, ragged=ragged)
        output = network.finish(residual, attended.transpose(1, 2))
        self.pool.features[ragged.blocks, ragged.offsets, 0] = output[0, : ragged.num_rows]
        logits = network.head(network.final_norm(output[0, tensor(wanted)]))[: len(wanted)].float()
        return list(torch.split(logits, [feed.num_rows for feed in feeds]))

    def _hidden(self, feeds: Sequence[EagleFeed], tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """[rows, hidden size]: fused features of the target, or the output that a draft token follows."""
        size = self.pool.block_size
        given = [feed.features for feed in feeds if feed.features is not None]
        followed = [
            (table[path[-1] // size], path[-1] % size)
            for feed, table in zip(feeds, tables, strict=True)
            for path in feed.paths
        ]
        parts = []
        if given:
            parts.append(self._network.fused(torch.cat(given).to(self._embedding)))
        if followed:
            blocks, offsets = torch.tensor(followed, device=self._embedding.device).T
            parts.append(self.pool.features[blocks, offsets, 0])
        if len(parts) == 1:
            return parts[0]
        fused, own = itertools.count(), itertools.count(len(parts[0]))
        order = [
            next(own if feed.features is None else fused)
            for feed in feeds
            for _ in range(len(feed.token_ids))
        ]
        return torch.cat(parts)[torch.tensor(order, device=self._embedding.device)]
