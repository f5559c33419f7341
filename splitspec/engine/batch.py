"""One pass as numbers alone, so that whoever runs it needs to know nothing of sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from splitspec.engine.feed import Feed
from splitspec.engine.plan import Span


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows are the tokens of all feeds, one feed after the other. wanted: the rows that give logits."""

    token_ids: list[int]
    positions: list[int]
    wanted: list[int]
    spans: list[Span]

    @classmethod
    def of(cls, feeds: Sequence[Feed], tables: Sequence[Sequence[int]]) -> Self:
        """tables: the blocks that each feed's tokens, held and new, are in."""
        batch = cls([], [], [], [])
        for feed, table in zip(feeds, tables, strict=True):
            batch.spans.append(Span.of(feed, len(batch.token_ids), table))
            batch.token_ids.extend(feed.token_ids)
            batch.positions.extend(feed.kv.length + depth for depth in feed.depths())
            end = len(batch.token_ids)
            batch.wanted.extend(range(end - feed.num_rows, end))
        return batch

    @property
    def sizes(self) -> list[int]:
        """Rows of each feed."""
        return [span.num_rows for span in self.spans]
