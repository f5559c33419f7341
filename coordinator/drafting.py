"""The draft side of one request: a link that comes back after its worker was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from coordinator.links import DraftLink
from protos.v1 import common_pb2
from splitspec.errors import SplitspecError
from splitspec.registry import WorkerHandle

log = structlog.get_logger()

Connect = Callable[[], Awaitable[DraftLink | None]]


class Drafting:
    """At most one link to a draft worker at a time. `connect` opens one, or returns None without a worker."""

    def __init__(self, connect: Connect, link: DraftLink | None, retry_s: float) -> None:
        self._connect = connect
        self._link = link
        self._retry_s = retry_s
        #: Name of the last link's drafter; empty before there was any.
        self.drafter = link.drafter if link is not None else ""
        #: What the target was asked to bring; a worker that comes later and wants others gets none.
        self.features: common_pb2.FeatureRequest | None = None
        self._rejoining: asyncio.Task[None] | None = None

    @property
    def link(self) -> DraftLink | None:
        """The link, None while there is no worker; then another one is looked for in the background."""
        if self._link is not None and not self._link.gone:
            return self._link
        if self._rejoining is None or self._rejoining.done():
            self._rejoining = asyncio.create_task(self._rejoin())
        return None

    @property
    def held(self) -> WorkerHandle | None:
        """Where the session's draft state is; None when no worker is known to hold it."""
        link = self._link
        if link is None or link.gone or not link.handle:
            return None
        return WorkerHandle(link.worker_id, link.handle, link.drafter)

    def drop(self, error: SplitspecError) -> None:
        """Leave a worker whose proposals are wrong."""
        if self._link is not None:
            log.warning("draft worker dropped", worker=self._link.worker_id, error=str(error))
            self._link.cancel()

    def cancel(self) -> None:
        """Leave at once."""
        if self._rejoining is not None:
            self._rejoining.cancel()
        if self._link is not None:
            self._link.cancel()

    async def _rejoin(self) -> None:
        await asyncio.sleep(self._retry_s)
        try:
            self._link = link = await self._connect()
        except SplitspecError as error:
            log.warning("no draft worker", error=str(error))
            return
        if link is not None:
            self.drafter = link.drafter
            if link.features != self.features:
                log.warning("draft worker gets no features: it wants others", worker=link.worker_id)
