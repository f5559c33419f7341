"""Ranks: the processes that run one model together, each with its share of the weights and of the KV.

The first rank keeps all accounts (sessions, tables, which block is whose), draws every token, and tells the
others each pass as numbers. The others keep no account, so that there is nothing they could disagree about
(docs/decisions/0004-ranks.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from transformers import PreTrainedModel

from splitspec.engine import shards
from splitspec.engine.batch import Batch
from splitspec.engine.blocks import BlockPool
from splitspec.engine.loading import parse_device
from splitspec.errors import ConfigError, UnavailableError

#: Ranks are started together, but load at different speeds, and the first one may have a model to download.
_LONGEST_JOINING = timedelta(minutes=5)
_LONGEST_LOADING = timedelta(hours=2)
#: Within a pass ranks wait for one another, between passes for the next one or a beat.
_LONGEST_SILENCE = timedelta(seconds=60)
_BEAT_S = 5.0
_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class Model(Protocol):
    """What the ranks run together: `CausalLM`."""

    @property
    def pool(self) -> BlockPool: ...

    def run(self, batch: Batch) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _Change:
    """What a BlockPool's method of that name does to the content of blocks."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Told:
    """One message of the first rank: changes to the pool, and then a pass; without one it is a beat."""

    changes: list[_Change]
    batch: Batch | None


class _LeadingPool(BlockPool):
    """The first rank's pool: what it changes in blocks between passes is told to the others with the next."""

    changes: list[_Change]

    def clear(self, blocks: list[int]) -> None:
        super().clear(blocks)
        self.changes.append(_Change("clear", (blocks,)))

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        super().copy_rows(source, target)
        self.changes.append(_Change("copy_rows", (source.cpu(), target.cpu())))

    def copy_block(self, source: int, target: int) -> None:
        super().copy_block(source, target)
        self.changes.append(_Change("copy_block", (source, target)))


def in_ranks() -> bool:
    """Whether torchrun started other processes beside this one."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def join_ranks(device: str) -> Ranks | None:
    """Meet the processes that torchrun started beside this one; None for one that runs alone.

    Raises ConfigError for a device that ranks can't share, or variables that aren't torchrun's, and
    UnavailableError when the others don't come.
    """
    if not in_ranks():
        return None
    missing = sorted(_VARIABLES - os.environ.keys())
    if missing:
        raise ConfigError(
            f"the variable WORLD_SIZE is {os.environ['WORLD_SIZE']!r} without {', '.join(missing)}, "
            "expected all of them as torchrun sets them, or none"
        )
    return Ranks.join(parse_device(device))


class Ranks:
    """This process among those that torchrun started.

    device: this rank's. group: what the model's layers exchange in. lost: gets the error once ranks can't go
    on together; after it none of them is of use, and the process has to end.
    """

    def __init__(self, device: torch.device, backend: str) -> None:
        self.device = device
        self.index: int
        self.size: int
        store, self.index, self.size = next(rendezvous("env://", timeout=_LONGEST_JOINING))
        place = _meeting_place(store, self.index, self.size)
        dist.init_process_group(
            backend, store=place, rank=self.index, world_size=self.size, timeout=_LONGEST_JOINING
        )
        self._loading: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_LONGEST_LOADING)
        self.group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=_LONGEST_SILENCE)
        self.lost: Future[UnavailableError] = Future()
        self._changes: list[_Change] = []
        self._parent = os.getppid()

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """See join_ranks."""
        place = _own_device(device)
        if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
            # All on this machine: nobody else needs to reach them.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            return cls(place, "gloo" if place.type == "cpu" else f"cpu:gloo,{place.type}:nccl")
        except RuntimeError as error:
            raise _lost(error) from error

    @contextlib.contextmanager
    def first_one_first(self) -> Iterator[None]:
        """The block runs on the first rank, and then on the others. Raises UnavailableError as `lead`."""
        if not self.is_first:
            self.wait_for_all()
        yield
        if self.is_first:
            self.wait_for_all()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def wait_for_all(self) -> None:
        """Return once every rank is here. Raises UnavailableError when one is lost."""
        self.least(0)

    def least(self, value: int) -> int:
        """The smallest of all ranks' values, at load. Raises UnavailableError when one is lost."""
        least = torch.tensor(value)
        with self._together():
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self._loading)
        return int(least)

    def loading_options(self, config: Any, name: str) -> dict[str, Any]:
        """See shards.py."""
        return shards.loading_options(config, name, self.size)

    def keep_own_shards(self, model: PreTrainedModel, name: str) -> None:
        """See shards.py."""
        shards.keep_own_shards(model, name, self.group)

    def make_pool(self, *args: Any, **kwargs: Any) -> BlockPool:
        """This rank's pool, of as many blocks as every rank has room for; arguments as for BlockPool.

        memory_bytes: of the device, so on a CPU of all ranks on this machine.
        """
        sharing = int(os.environ["LOCAL_WORLD_SIZE"]) if self.device.type == "cpu" else 1
        kwargs["memory_bytes"] = self.least(kwargs["memory_bytes"] // sharing)
        if not self.is_first:
            return BlockPool(*args, **kwargs)
        pool = _LeadingPool(*args, **kwargs)
        pool.changes = self._changes
        return pool

    def lead(self, model: Model, batch: Batch) -> torch.Tensor:
        """On the first rank: `model.run` on all of them. Raises UnavailableError when one is lost."""
        with self._together():
            self._tell(batch)
            return model.run(batch)

    def beat(self) -> None:
        """On the first rank: see that all are there. Raises UnavailableError when one is lost."""
        with self._together():
            self._tell(None)
            self._answer_beat()

    async def watch(self, post: Callable[[Callable[[], None]], None]) -> NoReturn:
        """On the first rank: beat until a rank is lost, and raise the error then.

        post: calls something on the thread that runs passes.
        """
        lost = asyncio.wrap_future(self.lost)
        while not lost.done():
            post(self.beat)
            await asyncio.wait({lost}, timeout=_BEAT_S)
        raise lost.result()

    def end(self) -> None:
        """On the first rank: let the others return from `follow`. Raises UnavailableError as `lead`."""
        with self._together():
            self._say(None)

    @torch.inference_mode()
    def follow(self, model: Model) -> None:
        """On the others: run what the first one tells, until it ends. Raises UnavailableError as `lead`."""
        with self._together():
            while (told := self._hear()) is not None:
                for change in told.changes:
                    getattr(model.pool, change.method)(*change.arguments)
                if told.batch is None:
                    self._answer_beat()
                else:
                    model.run(told.batch)

    def leave(self) -> None:
        """Part from the others."""
        dist.destroy_process_group()

    def _tell(self, batch: Batch | None) -> None:
        told = _Told(self._changes.copy(), batch)
        self._say(told)
        self._changes.clear()

    def _answer_beat(self) -> None:
        if os.getppid() != self._parent:
            raise RuntimeError("torchrun has ended, and would start other ranks in the place of these")
        dist.barrier(self.group)

    def _say(self, told: _Told | None) -> None:
        dist.broadcast_object_list([told], src=0, group=self.group, device=torch.device("cpu"))

    def _hear(self) -> _Told | None:
        heard: list[_Told | None] = [None]
        dist.broadcast_object_list(heard, src=0, group=self.group, device=torch.device("cpu"))
        return heard[0]

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Whatever goes wrong on one rank in here leaves the others somewhere else: they can't go on."""
        if self.lost.done():
            raise self.lost.result()
        try:
            yield
        except Exception as error:
            lost = _lost(error)
            self.lost.set_result(lost)
            raise lost from error


def _meeting_place(store: Store, index: int, size: int) -> Store:
    """A part of the store that this start of the ranks has for itself.

    Torchrun keeps its store when it starts ranks again, with the addresses of those that are gone. So the
    first rank names a new place, and whoever has read the name of an old one gets no answer there.
    """
    name = uuid.uuid4().hex
    if index == 0:
        store.set("place", name)
        for other in range(1, size):
            store.set(store.get(f"{name}/{other}").decode(), "seen")
        return PrefixStore(name, store)
    end = time.monotonic() + _LONGEST_JOINING.total_seconds()
    while time.monotonic() < end:
        place = store.get("place").decode()
        store.set(f"{place}/{index}", name)
        with contextlib.suppress(dist.DistStoreError):
            store.wait([name], timedelta(seconds=1))
            return PrefixStore(place, store)
    raise RuntimeError("the first rank did not come")


def _own_device(device: torch.device) -> torch.device:
    """Of a kind of device the one for this rank. The library splits models between accelerators if it can."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu" if accelerator is None else accelerator.type
    if device != torch.device(kind):
        raise ConfigError(
            f"device is {str(device)!r}, expected {kind}: ranks on this machine have one each", field="device"
        )
    return device if kind == "cpu" else torch.device(kind, int(os.environ["LOCAL_RANK"]))


def _lost(error: Exception) -> UnavailableError:
    reason = " ".join(str(error).split())[:300]
    return UnavailableError(
        f"a rank of this worker was lost, and the others can't go on without it: {reason}"
    )
