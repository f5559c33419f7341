"""The pool of KV blocks: who holds which, which are shared, which may be evicted."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from splitspec.errors import ConfigError, OverloadedError

if TYPE_CHECKING:
    from splitspec.engine.kv import KV

_RETRY_AFTER_S = 1.0
#: Blocks side by side that a text may begin with.
_STRETCH = 16


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps for a token: a key and a value for each of its KV heads."""

    num_kv_heads: int
    key_size: int
    value_size: int

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_size + self.value_size)


class BlockPool:
    """Blocks of `block_size` tokens, counted by reference and addressed by id alone.

    A full block whose tokens are final can be registered under the hash of all tokens up to its end. It
    then stays, also without holders, until its room is needed: least recently used first. A block that
    is registered or has several holders is shared, and is never written.

    Not thread-safe, but for `give_back` and the counts.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        memory_bytes: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        feature_layers: int = 0,
        hidden_size: int = 0,
    ) -> None:
        """feature_layers: how many layers' outputs are kept of each token, of `hidden_size` elements each."""
        elements = sum(layer.elements_per_token for layer in layers) + feature_layers * hidden_size
        self.shapes = tuple(layers)
        self.block_size = block_size
        self.block_bytes = elements * block_size * dtype.itemsize
        self.num_blocks = memory_bytes // self.block_bytes
        if self.num_blocks < 1:
            raise ConfigError(
                f"kv_memory_bytes is {memory_bytes}, expected at least the {self.block_bytes} of one block",
                field="kv_memory_bytes",
            )
        self.dtype = dtype
        self.device = device
        #: For each layer two tensors [blocks, tokens, KV heads, size], so that blocks side by side are one
        #: run of tokens. Not touched before a block is handed out, so they cost no memory yet.
        self.keys, self.values = (
            [self._empty(layer.num_kv_heads, size) for layer, size in zip(layers, sizes, strict=True)]
            for sizes in ([layer.key_size for layer in layers], [layer.value_size for layer in layers])
        )
        #: [blocks, tokens, layers, hidden size]: go where a token's keys go.
        self.features = self._empty(feature_layers, hidden_size)
        self._unused = _Unused(self.num_blocks)
        self._holders: Counter[int] = Counter()
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._resting: weakref.WeakValueDictionary[int, KV] = weakref.WeakValueDictionary()
        #: Levels are read by other threads.
        self._lock = threading.RLock()
        self._returned: deque[list[int]] = deque()

    def _empty(self, *sizes: int) -> torch.Tensor:
        return torch.empty(self.num_blocks, self.block_size, *sizes, dtype=self.dtype, device=self.device)

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest text that surely fits: a block is kept to copy a shared one to."""
        return max(1, self.num_blocks - 1) * self.block_size

    @property
    def num_used(self) -> int:
        """Blocks that some KV holds."""
        with self._lock:
            self._collect()
            return len(self._holders)

    @property
    def num_shared(self) -> int:
        """Blocks that several KVs hold."""
        with self._lock:
            self._collect()
            return sum(count > 1 for count in self._holders.values())

    @property
    def num_cached(self) -> int:
        """Registered blocks that no KV holds."""
        with self._lock:
            self._collect()
            return len(self._evictable)

    @property
    def num_free(self) -> int:
        """Blocks without content; those that could be evicted aren't counted."""
        with self._lock:
            self._collect()
            return len(self._unused)

    def allocate(self, wanted: Sequence[tuple[int | None, int]]) -> list[list[int]]:
        """For each (last, count) so many blocks of zeros with one holder each; behind block `last`, if free.

        Raises OverloadedError, with nothing changed.
        """
        needed = sum(count for _, count in wanted)
        room = self._make_room(needed)
        if needed > room:
            raise OverloadedError(
                f"{needed} blocks of KV are needed, but {room} of {self.num_blocks} are free or evictable; "
                "try again when other sessions have ended",
                retry_after_s=_RETRY_AFTER_S,
            )
        with self._lock:
            runs = [self._take_run(last, count) for last, count in wanted]
        if needed:
            self.clear([block for run in runs for block in run])
        return runs

    def _make_room(self, needed: int) -> int:
        """Blocks that can be taken, when there may be enough of them with those of KVs that rest."""
        room = self.num_free + len(self._evictable)
        if needed <= room or needed > room + sum(len(kv.table) for kv in self._resting.values()):
            return room
        while needed > room and (resting := next(iter(self._resting.values()), None)):
            self.wake(resting)
            resting.truncate(0)
            room = self.num_free + len(self._evictable)
        return room

    def _take_run(self, last: int | None, count: int) -> list[int]:
        run = []
        for _ in range(count):
            last = self._unused.take(last) if self._unused else self._evict()
            run.append(last)
        self._holders.update(run)
        return run

    def _evict(self) -> int:
        """The least recently used block of those that are registered and that nobody holds."""
        block, _ = self._evictable.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def rest(self, kv: KV) -> None:
        """Take its blocks back where room is needed; of several the one that has rested longest first."""
        self.wake(kv)
        self._resting[id(kv)] = kv

    def wake(self, kv: KV) -> None:
        self._resting.pop(id(kv), None)

    def hold(self, block: int) -> None:
        """One more holder of a block that is held or registered."""
        with self._lock:
            self._evictable.pop(block, None)
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less of each. The last of a text are let go first, so that they are evicted first."""
        with self._lock:
            for block in reversed(list(blocks)):
                self._holders[block] -= 1
                if not self._holders[block]:
                    del self._holders[block]
                    if block in self._key_of:
                        self._evictable[block] = None
                    else:
                        self._unused.put(block)

    def give_back(self, blocks: list[int]) -> None:
        """Release from any thread: it takes effect with the next look at the pool."""
        self._returned.append(list(blocks))

    def shared(self, block: int) -> bool:
        """Whether a write into the block would change what others hold or may find."""
        return block in self._key_of or self._holders[block] > 1

    def register(self, block: int, key: bytes) -> None:
        """Let others find a full block. Of two with the same content the first stays the one to find."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, key: bytes) -> int | None:
        """The block registered under a key."""
        with self._lock:
            self._collect()
            return self._block_of.get(key)

    def clear(self, blocks: list[int]) -> None:
        """Set to zeros: rows that were never written are masked, but 0 times a stale infinity isn't 0."""
        index = torch.tensor(blocks, device=self.device)
        for held in (*self.keys, *self.values):
            held.index_fill_(0, index, 0)

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what is held of single tokens; [2, tokens] of (block, row in block) each."""
        for held in (*self.keys, *self.values, self.features):
            held[target[0], target[1]] = held[source[0], source[1]]

    def copy_block(self, source: int, target: int) -> None:
        for held in (*self.keys, *self.values, self.features):
            held[target] = held[source]

    def _collect(self) -> None:
        while self._returned:
            self.release(self._returned.popleft())


class _Unused:
    """Ids without content, given out so that those of one session come to lie side by side.

    A text begins at a stretch that is free as a whole, while there is one, so that others don't begin where
    it wants to go on.
    """

    def __init__(self, count: int) -> None:
        self._ids = dict.fromkeys(range(count))
        self._free_of = [min(_STRETCH, count - start) for start in range(0, count, _STRETCH)]
        self._whole = dict.fromkeys(range(count // _STRETCH))

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, last: int | None) -> int:
        """The id behind `last` if it is unused, else one to begin with. Raises StopIteration without any."""
        following = None if last is None else last + 1
        if following not in self._ids:
            stretch = next(iter(self._whole), None)
            following = next(iter(self._ids)) if stretch is None else stretch * _STRETCH
        assert following is not None
        del self._ids[following]
        self._free_of[following // _STRETCH] -= 1
        self._whole.pop(following // _STRETCH, None)
        return following

    def put(self, block: int) -> None:
        self._ids[block] = None
        stretch = block // _STRETCH
        self._free_of[stretch] += 1
        if self._free_of[stretch] == _STRETCH:
            self._whole[stretch] = None


def block_key(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a text up to the end of a block, from that of the text before the block and its tokens."""
    return hashlib.sha256(previous + b"".join(t.to_bytes(4, "little") for t in token_ids)).digest()


def tenant_key(tenant: str) -> bytes:
    """Where the chain of hashes starts: tenants share nothing, nor learn what others have sent."""
    return hashlib.sha256(tenant.encode()).digest()
