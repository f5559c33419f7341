"""KV of one session: a table of blocks, rewound by setting a length."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from splitspec.engine.blocks import BlockPool, block_key, tenant_key


class KV:
    """Keys and values of a session's tokens, in blocks of a pool that only its table leads to.

    Rows behind `length` are stale and get overwritten; the table may reach further, for a text that is being
    fed. The blocks go back to the pool with `free`, or
    when nobody refers to the KV any more, from whatever thread.
    """

    def __init__(self, pool: BlockPool, tenant: str = "") -> None:
        self.table: list[int] = []
        self.token_ids: list[int] = []
        #: Tokens that a path must be chosen from before more can be fed: those of a tree.
        self.num_tree_tokens = 0
        self._pool = pool
        #: Keys of the text up to the start, the end of the first final block, of the second, and so on.
        self._keys = [tenant_key(tenant)]
        self._give_back = weakref.finalize(self, pool.give_back, self.table)
        # The pool doesn't outlive the process.
        self._give_back.atexit = False

    @property
    def length(self) -> int:
        """Tokens held."""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks held, shared ones included."""
        return len(self.table) * self._pool.block_bytes

    @property
    def freed(self) -> bool:
        return not self._give_back.alive

    def free(self) -> None:
        """Give the blocks back; nothing can be fed any more. A second call does nothing."""
        self._give_back()
        self.table.clear()
        self.token_ids.clear()
        self.num_tree_tokens = 0

    def fork(self) -> KV:
        """Another KV of the same tokens: it shares all blocks, and a write into one that is shared copies it.

        Raises ValueError for one that ends in a tree.
        """
        if self.num_tree_tokens:
            raise ValueError("the KV ends in a tree: choose a path of it before it is forked")
        copy = KV(self._pool)
        copy.table.extend(self.table[: -(-self.length // self._pool.block_size)])
        for block in copy.table:
            self._pool.hold(block)
        copy.token_ids.extend(self.token_ids)
        copy._keys[:] = self._keys
        return copy

    def rest(self) -> None:
        """Nobody works on the session for now: where room is needed, its blocks may be taken back."""
        self._pool.rest(self)

    def wake(self) -> None:
        """The session is worked on again. It holds what it held, or nothing."""
        self._pool.wake(self)

    def adopt(self, token_ids: Sequence[int], multiple: int = 1) -> None:
        """Hold the registered blocks that an empty KV starts with, up to a multiple of so many tokens."""
        assert not self.token_ids
        self._adopt(token_ids)
        self.truncate(self.length // multiple * multiple)

    def _adopt(self, token_ids: Sequence[int]) -> None:
        size = self._pool.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            key = block_key(self._keys[-1], token_ids[start : start + size])
            block = self._pool.find(key)
            if block is None:
                return
            self._pool.hold(block)
            self.table.append(block)
            self._keys.append(key)
            self.token_ids.extend(token_ids[start : start + size])

    def finalise(self, length: int) -> None:
        """The first `length` tokens are final: let other sessions share their full blocks.

        Raises ValueError when fewer are held.
        """
        if not 0 <= length <= self.length - self.num_tree_tokens:
            raise ValueError(f"can't finalise {length} of {self.length} tokens")
        size = self._pool.block_size
        for index in range(len(self._keys) - 1, length // size):
            key = block_key(self._keys[-1], self.token_ids[index * size : (index + 1) * size])
            self._pool.register(self.table[index], key)
            self._keys.append(key)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. Raises ValueError when there are fewer, or for part of a tree."""
        if not 0 <= length <= self.length:
            raise ValueError(f"can't truncate the KV of {self.length} tokens to {length}")
        if self.length - self.num_tree_tokens < length < self.length:
            raise ValueError(f"can't truncate to {length}, in the middle of a tree: choose a path of it")
        if length < self.length:
            self.num_tree_tokens = 0
        del self.token_ids[length:]
        size = self._pool.block_size
        del self._keys[length // size + 1 :]
        self._release_after(-(-length // size))

    def keep_path(self, base: int, nodes: Sequence[int]) -> None:
        """Of a tree fed on `base` tokens keep the root, which was fed with it, and the nodes of one path.

        nodes: indices of draft tokens, from the root's child on. Raises ValueError for anything but a
        tree's base and ascending nodes of it.
        """
        first = base + 1
        if not self.num_tree_tokens or self.length - self.num_tree_tokens != first:
            raise ValueError(f"no tree was fed on {base} tokens")
        if list(nodes) != sorted(set(nodes)) or any(not 0 <= n < self.num_tree_tokens for n in nodes):
            raise ValueError(f"nodes are {list(nodes)}, expected a path of {self.num_tree_tokens} nodes")
        kept = [self.token_ids[first + node] for node in nodes]
        if list(nodes) != list(range(len(nodes))):
            self._pool.copy_rows(
                self.slots([first + node for node in nodes]), self.slots(range(first, first + len(nodes)))
            )
        self.num_tree_tokens = 0
        self.token_ids[first:] = kept
        self._release_after(-(-self.length // self._pool.block_size))

    def slots(self, rows: Sequence[int]) -> torch.Tensor:
        """[2, rows]: block and row in it of some tokens."""
        size = self._pool.block_size
        return torch.tensor(
            [[self.table[row // size] for row in rows], [row % size for row in rows]],
            dtype=torch.int64,
            device=self._pool.device,
        )

    def _release_after(self, count: int) -> None:
        self._pool.release(self.table[count:])
        del self.table[count:]
