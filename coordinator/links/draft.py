"""The stream to the draft worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import structlog

from coordinator.links.base import Link
from coordinator.session import Session
from coordinator.stats import Stats, Wait
from coordinator.workers import DraftHost
from protos.v1 import common_pb2, draft_pb2
from splitspec.errors import OutOfSyncError
from splitspec.telemetry import NO_SPAN, Span, names

log = structlog.get_logger()

#: A draft worker that owes an answer for longer than this is given up, and looked for again.
_LOST_AFTER_S = 10.0
#: Opening feeds the whole prompt.
_OPEN_LIMIT_S = 120.0

#: What a draft worker gets to answer at the end of a request, twice.
_CLOSE_LIMIT_S = 0.5

Response = draft_pb2.DraftSessionResponse


class DraftLink(Link[draft_pb2.DraftSessionRequest, draft_pb2.DraftSessionResponse]):
    """The stream to the draft worker. Its errors never reach the request: `gone` says that it has failed.

    At most one answer is outstanding. An answer that comes too late is dropped, and until it has come the
    worker is asked for nothing new.
    """

    role = "draft"

    def __init__(
        self,
        host: DraftHost,
        drafter: str,
        session: Session,
        stats: Stats,
        handle: str,
        held: int,
        lease_ms: int,
        deadline_s: float | None,
    ) -> None:
        super().__init__(host.worker_id, host.stub.DraftSession(timeout=deadline_s), session, stats)
        info = host.drafter(drafter)
        assert info is not None
        self.drafter = drafter
        #: What the drafter wants of the target; None for nothing.
        self.features = info.features if info.features.layers else None
        #: Tokens whose features the worker holds or was sent; None while it isn't open.
        self._features_length: int | None = None
        self._features: common_pb2.Features | None = None
        self.gone = False
        self._lease_ms = lease_ms
        self._sent = 0
        self._opened = False
        self._pending = self._ask(self._start(handle, held))

    async def _start(self, handle: str, held: int) -> Response:
        """Open the session; the answer is taken by `_settle` like any other."""
        stamp, start = self._session.stamp(), held if handle else 0
        with self._waiting(names.OPEN) as wait:
            while True:
                message = self._open(handle, start, stamp.base_length, self._lease_ms, self.drafter)
                await self._write(draft_pb2.DraftSessionRequest(stamp=stamp, trace=wait.trace, open=message))
                response = await self._read()
                handle, length = response.opened.handle, response.opened.length
                if length == stamp.base_length:
                    self._sent = length
                    self._features_length = min(response.opened.features_length, length - 1)
                    wait.opened(response.opened)
                    return response
                if length >= start:
                    raise OutOfSyncError(f"{self._name} took {length} of {stamp.base_length} tokens")
                start = length

    @property
    def features_start(self) -> int | None:
        """First token whose features it lacks; None when it wants none, or isn't open yet."""
        return self._features_length if self.features is not None else None

    def bring(self, features: common_pb2.Features) -> None:
        """Features of the target for the next Propose. Of no use when some before them are missing."""
        if self.features_start is not None and features.start <= self.features_start:
            self._features = features

    async def propose(
        self, num_draft_tokens: int, num_accepted: int, patience_s: float
    ) -> common_pb2.Proposal | None:
        """A proposal on the session's committed tokens, or None when it doesn't come within the patience."""
        with self._waiting(names.PROPOSE) as wait:
            response = await self._proposal(num_draft_tokens, num_accepted, patience_s, wait)
            wait.proposed(response)
            return response

    async def _proposal(
        self, num_draft_tokens: int, num_accepted: int, patience_s: float, wait: Wait
    ) -> common_pb2.Proposal | None:
        deadline = time.monotonic() + patience_s
        # The first answer may wait for the prompt. After a missed proposal only what has arrived counts.
        if await self._settle(0 if self._opened else patience_s, wait.span) is None:
            return None
        stamp = self._session.next_round()
        message = draft_pb2.Propose(
            num_draft_tokens=num_draft_tokens,
            start=self._sent,
            token_ids=self._session.tokens[self._sent :],
            num_accepted=num_accepted,
            features=self._features,
        )
        self._sent = len(self._session.tokens)
        if self._features is not None:
            self._features_length = self._features.start + self._features.shape[0]
            self._features = None
        request = draft_pb2.DraftSessionRequest(stamp=stamp, trace=wait.trace, propose=message)
        self._pending = self._ask(self._exchange(request))
        response = await self._settle(max(0, deadline - time.monotonic()), wait.span)
        if response is None:
            return None
        proposal = response.proposal
        if proposal.stamp != stamp or proposal.num_draft_tokens > num_draft_tokens:
            log.warning("draft worker sent a wrong proposal", worker=self.worker_id, stamp=proposal.stamp)
            self.cancel()
            return None
        return proposal

    async def close(self) -> None:
        """The final cut; the worker keeps the handle for its lease. Waits for an answer that is still due."""
        if await self._settle(_CLOSE_LIMIT_S) is None:
            self.cancel()
            return
        request = draft_pb2.DraftSessionRequest(
            stamp=self._session.stamp(), close=common_pb2.Close(keep_handle=True)
        )
        self._pending = self._ask(self._exchange(request))
        await self._settle(_CLOSE_LIMIT_S)

    def cancel(self) -> None:
        super().cancel()
        self.gone = True

    def _ask(self, exchange: Coroutine[Any, Any, Response]) -> asyncio.Task[Response]:
        """Begin an exchange; its failure counts as seen even when nobody asks for the answer any more."""
        self._asked = time.monotonic()
        pending = asyncio.create_task(exchange)
        pending.add_done_callback(lambda task: task.cancelled() or task.exception())
        return pending

    async def _exchange(self, request: draft_pb2.DraftSessionRequest) -> draft_pb2.DraftSessionResponse:
        await self._write(request)
        return await self._read()

    async def _settle(self, patience_s: float, span: Span = NO_SPAN) -> draft_pb2.DraftSessionResponse | None:
        """The outstanding answer once it is there, or None: late, or the worker is gone. span: the wait's."""
        done, _ = await asyncio.wait({self._pending}, timeout=patience_s)
        if not done:
            if time.monotonic() - self._asked > (_LOST_AFTER_S if self._opened else _OPEN_LIMIT_S):
                log.warning("draft worker hangs", worker=self.worker_id, session=self._session.session_id)
                self.cancel()
            return None
        error = self._pending.exception() if not self._pending.cancelled() else asyncio.CancelledError()
        if error is not None:
            span.fail(error)
            if not self.gone:
                log.warning(
                    "draft worker lost",
                    worker=self.worker_id,
                    error=str(error),
                    session=self._session.session_id,
                )
            self.cancel()
            return None
        response = self._pending.result()
        if response.HasField("opened"):
            self._opened, self.handle = True, response.opened.handle
        return response
