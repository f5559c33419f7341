"""What one session contributes to a pass, and the blocks that it needs for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from splitspec.engine.blocks import BlockPool
from splitspec.engine.kv import KV

#: Up to here all products of a layer add in the same order, so that the rows of short feeds can go together
#: in any way. With more rows a processor with tile registers takes another kernel in bfloat16: several times
#: faster, and other bits. Longer feeds, chunks of prompts, are therefore products of their own.
LONGEST_SHORT_FEED = 32
#: Prompts are fed in pieces that end at multiples of it, so that the same text is fed in the same pieces.
PIECE = 128


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """Tokens fed behind those that `kv` holds, and how many of the last ones give logits.

    parents: empty for a chain. Else token_ids[0] is the root of a tree, the last committed token, and
    parents[i] is the index in token_ids of the parent of token_ids[i + 1]: for draft tokens that is the
    parent's index plus one, and 0 for children of the root, as in ProposalBody.
    num_following: tokens that later passes feed behind these. The first one takes room for all, so that a
    text waits for room without holding any.
    """

    kv: KV
    token_ids: Sequence[int]
    num_rows: int
    parents: Sequence[int] = field(default=())
    num_following: int = field(default=0, kw_only=True)

    #: Whether the KV's tokens alone make it again, should it have given its blocks back.
    can_be_fed_again = True

    @property
    def end(self) -> int:
        """Tokens that the KV holds once these and those that follow are fed."""
        return self.kv.length + len(self.token_ids) + self.num_following

    def depths(self) -> list[int]:
        """Distance of each token from the first."""
        if not self.parents:
            return list(range(len(self.token_ids)))
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def cut(self, count: int) -> tuple[Feed, Feed]:
        """Of a chain the first `count` tokens, which give no logits, and the rest."""
        rest = replace(self, token_ids=self.token_ids[count:])
        following = len(rest.token_ids) + self.num_following
        return replace(self, token_ids=self.token_ids[:count], num_rows=0, num_following=following), rest

    def check(self, vocabulary_size: int, max_context: int) -> None:
        """Raise ValueError unless the feed makes sense."""
        ids, held = self.token_ids, self.kv.length
        if self.kv.freed:
            raise ValueError("the KV is freed")
        if not ids:
            raise ValueError("no tokens to feed, expected at least one")
        if not 0 <= self.num_rows <= len(ids):
            raise ValueError(f"num_rows is {self.num_rows}, expected 0 to the {len(ids)} tokens fed")
        if min(ids) < 0 or max(ids) >= vocabulary_size:
            wrong = next(token for token in ids if not 0 <= token < vocabulary_size)
            raise ValueError(f"token id {wrong} is outside the vocabulary of {vocabulary_size}")
        if self.end > max_context:
            added = self.end - held
            raise ValueError(f"{added} tokens on top of {held} don't fit the context of {max_context}")
        if self.kv.num_tree_tokens:
            raise ValueError("the KV ends in a tree: choose a path of it before more is fed")
        if self.parents and len(self.parents) != len(ids) - 1:
            raise ValueError(f"{len(self.parents)} parents, expected one for each token but the root")
        for index, parent in enumerate(self.parents):
            if not 0 <= parent <= index:
                raise ValueError(f"parents[{index}] is {parent}, expected 0 to {index}: parents come first")


class Reservation:
    """The tables that the feeds of a pass write through, until it has succeeded.

    Raises OverloadedError when the pool lacks the blocks; nothing has changed then.
    """

    def __init__(self, pool: BlockPool, feeds: Sequence[Feed]) -> None:
        self._pool = pool
        self._feeds = feeds
        size = pool.block_size
        # A shared block that would be written is the one that the text ends in, and only that.
        copied = [
            feed.kv.length % size != 0 and pool.shared(feed.kv.table[feed.kv.length // size])
            for feed in feeds
        ]
        missing = [max(0, -(-feed.end // size) - len(feed.kv.table)) for feed in feeds]
        self._new = pool.allocate(
            [
                (feed.kv.table[-1 - copy] if len(feed.kv.table) > copy else None, more + copy)
                for feed, more, copy in zip(feeds, missing, copied, strict=True)
            ]
        )
        self.tables: list[list[int]] = []
        for feed, copy, new in zip(feeds, copied, self._new, strict=True):
            table = list(feed.kv.table)
            if copy:
                written = feed.kv.length // size
                pool.copy_block(table[written], new[0])
                table[written] = new[0]
            self.tables.append(table + new[copy:])

    def undo(self) -> None:
        """The pass has failed: every KV is as before."""
        self._pool.release(block for run in self._new for block in run)

    def commit(self) -> None:
        """The pass has written what was fed."""
        for feed, table in zip(self._feeds, self.tables, strict=True):
            kv = feed.kv
            self._pool.release(old for old, new in zip(kv.table, table, strict=False) if old != new)
            # In place: the finalizer that gives the blocks back knows this list.
            kv.table[:] = table
            kv.token_ids.extend(feed.token_ids)
            kv.num_tree_tokens = len(feed.parents)
