"""The stream to the draft worker."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import structlog

from coordinator.links.base import Link
from coordinator.session import Session
from coordinator.stats import Stats, Wait
from coordinator.workers import DraftHost
from protos.v1 import common_pb2, draft_pb2
from splitspec.errors import OutOfSyncError, SplitspecError
from splitspec.overlap import holds
from splitspec.telemetry import NO_SPAN, Span, names
from splitspec.types import Mode

log = structlog.get_logger()

#: A draft worker that owes an answer for longer than this is given up, and looked for again.
_LOST_AFTER_S = 10.0
#: Opening feeds the whole prompt.
_OPEN_LIMIT_S = 120.0

#: What a draft worker gets to answer at the end of a request, twice.
_CLOSE_LIMIT_S = 0.5

#: The features of one Propose, as of one verdict (splitspec/features.py).
_MOST_FEATURE_BYTES = 3 * 1024 * 1024

#: Hands the target a proposal whose parent has no verdict yet.
Relay: TypeAlias = Callable[[common_pb2.Proposal], Awaitable[None]]


class DraftLink(Link[draft_pb2.DraftSessionRequest, draft_pb2.DraftSessionResponse]):
    """The stream to the draft worker. Its errors never reach the request: `gone` says that it has failed.

    At most one answer is due. One that comes too late is dropped, and until it has come the worker is asked
    for nothing new. What it has drafted ahead of the verdicts is handed to `relay` as it comes.
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
        #: Of the drafter with its weights: the same name may come back with others.
        self.identity = f"{drafter} {info.model.fingerprint}"
        #: What the drafter wants of the target; None for nothing.
        self.features = info.features if info.features.layers else None
        #: What it can do while the target verifies.
        self.modes = host.modes(drafter)
        # Tokens whose features the worker holds or was sent; until it is open, those that it should hold.
        self._features_length = max(0, held - 1) if handle else 0
        # Features that the next Propose brings.
        self._features: common_pb2.Features | None = None
        self.gone = False
        self._error: SplitspecError | None = None
        self.relay: Relay | None = None
        self._lease_ms = lease_ms
        self._sent = 0
        self._opened = self._closed = False
        # The last Propose while its answer is due, and the answer. in_time: it is being waited for, or was.
        self._asked: common_pb2.Stamp | None = None
        self._num_asked = 0
        self._answer: common_pb2.Proposal | None = None
        self._in_time = False
        self._since = time.monotonic()
        self._news = asyncio.Event()
        self._receiving = asyncio.create_task(self._receive(handle, held))

    @property
    def is_open(self) -> bool:
        """The worker has taken the session; until then a proposal waits for it."""
        return self._opened

    @property
    def waited_s(self) -> float:
        """Seconds since the last proposal was asked for."""
        return time.monotonic() - self._since

    @property
    def features_start(self) -> int | None:
        """First token whose features the target should bring next; None when none are wanted now."""
        if self.features is None:
            return None
        if self._features is None:
            return self._features_length
        return _end(self._features) if _room(self._features) > 0 else None

    def bring(self, features: common_pb2.Features) -> None:
        """Features of the target for the next Propose, behind those that wait for it already. Of no use when
        some before them are missing.
        """
        start = self.features_start
        if start is None or features.start > start:
            return
        self._features = features if self._features is None else _joined(self._features, features)

    async def propose(
        self, num_draft_tokens: int, num_accepted: int, patience_s: float, mode: Mode, num_ahead: int
    ) -> common_pb2.Proposal | None:
        """A proposal on the session's committed tokens, or None when it doesn't come within the patience.

        mode, num_ahead: what the worker is to do until the next call.
        """
        with self._waiting(names.PROPOSE) as wait:
            proposal = await self._proposal(num_draft_tokens, num_accepted, patience_s, mode, num_ahead, wait)
            wait.proposed(proposal)
            return proposal

    async def go_on(self, num_draft_tokens: int, num_accepted: int, mode: Mode, num_ahead: int) -> None:
        """The same, when the proposal has been relayed already: nothing is waited for."""
        if not self._in_time or self.gone:
            return
        try:
            stamp, trace = self._session.next_round(), self._stats.trace
            await self._ask(stamp, num_draft_tokens, num_accepted, mode, num_ahead, trace)
        except SplitspecError as error:
            self._lost(error)

    async def close(self) -> None:
        """The final cut; the worker keeps the handle for its lease. Waits for an answer that is still due."""
        self._in_time = False
        if not await self._wait(lambda: self._opened and self._asked is None, _CLOSE_LIMIT_S):
            self.cancel()
            return
        try:
            message = common_pb2.Close(keep_handle=True)
            await self._write(draft_pb2.DraftSessionRequest(stamp=self._session.stamp(), close=message))
        except SplitspecError as error:
            self._lost(error)
        await self._wait(lambda: self._closed, _CLOSE_LIMIT_S)

    def cancel(self) -> None:
        super().cancel()
        self._receiving.cancel()
        self.gone = True

    async def _proposal(
        self,
        num_draft_tokens: int,
        num_accepted: int,
        patience_s: float,
        mode: Mode,
        num_ahead: int,
        wait: Wait,
    ) -> common_pb2.Proposal | None:
        deadline = time.monotonic() + patience_s
        self._in_time = False
        # The first answer may wait for the prompt. After a missed proposal only what has arrived counts.
        ready = await self._wait(
            lambda: self._opened and self._asked is None, 0 if self._opened else patience_s, wait.span
        )
        if not ready:
            return None
        self._asked = stamp = self._session.next_round()
        self._answer, self._num_asked, self._in_time = None, num_draft_tokens, True
        try:
            await self._ask(stamp, num_draft_tokens, num_accepted, mode, num_ahead, wait.trace)
        except SplitspecError as error:
            self._lost(error, wait.span)
            return None
        self._in_time = await self._wait(
            lambda: self._asked is None, max(0, deadline - time.monotonic()), wait.span
        )
        return self._answer if self._in_time else None

    async def _ask(
        self,
        stamp: common_pb2.Stamp,
        num_draft_tokens: int,
        num_accepted: int,
        mode: Mode,
        num_ahead: int,
        trace: common_pb2.TraceContext | None,
    ) -> None:
        message = draft_pb2.Propose(
            num_draft_tokens=num_draft_tokens,
            start=self._sent,
            token_ids=self._session.tokens[self._sent :],
            num_accepted=num_accepted,
            features=self._features,
            mode=mode.value,
            num_ahead=num_ahead,
        )
        self._sent = len(self._session.tokens)
        if self._features is not None:
            self._features_length = _end(self._features)
            self._features = None
        self._since = time.monotonic()
        await self._write(draft_pb2.DraftSessionRequest(stamp=stamp, trace=trace, propose=message))

    async def _receive(self, handle: str, held: int) -> None:
        """Open the session, and take what comes until the stream ends."""
        try:
            await self._start(handle, held)
            while not self._closed:
                self._news.set()
                response = await self._read()
                self._closed = response.HasField("closed")
                if response.HasField("proposal"):
                    await self._take(response.proposal)
        except SplitspecError as error:
            self._lost(error)
        finally:
            self._news.set()

    async def _start(self, handle: str, held: int) -> None:
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
                    if self._features is not None and self._features.start > self._features_length:
                        self._features = None  # the worker holds less than it should
                    wait.opened(response.opened)
                    self._opened, self.handle = True, handle
                    return
                if length >= start:
                    raise OutOfSyncError(f"{self._name} took {length} of {stamp.base_length} tokens")
                start = length

    async def _take(self, proposal: common_pb2.Proposal) -> None:
        """The answer that is due, or a proposal ahead of the verdicts. Others were drafted for a verdict that
        didn't come."""
        drawing, round_number = self._session.drawing, proposal.stamp.round
        assert drawing is not None
        if self._asked is not None and round_number == self._asked.round:
            if proposal.parent_round:
                if not holds(proposal, self._session.tokens, drawing.rule):
                    return
            elif proposal.stamp != self._asked or proposal.num_draft_tokens > self._num_asked:
                log.warning("draft worker sent a wrong proposal", worker=self.worker_id, stamp=proposal.stamp)
                self.cancel()
                return
            self._asked, self._answer = None, proposal
        elif self._asked is None and self._in_time and self.relay and round_number > self._session.round:
            with contextlib.suppress(SplitspecError):  # the target's: its next verdict tells
                await self.relay(proposal)

    async def _wait(self, ready: Callable[[], bool], patience_s: float, span: Span = NO_SPAN) -> bool:
        """Whether it is so within the patience; no longer once the worker is gone. span: the wait's."""
        deadline = time.monotonic() + patience_s
        while not ready() and not self.gone:
            self._news.clear()
            try:
                async with asyncio.timeout(max(0, deadline - time.monotonic())):
                    await self._news.wait()
            except TimeoutError:
                if time.monotonic() - self._since > (_LOST_AFTER_S if self._opened else _OPEN_LIMIT_S):
                    log.warning("draft worker hangs", worker=self.worker_id, session=self._session.session_id)
                    self.cancel()
                return False
        if self.gone and self._error is not None:
            span.fail(self._error)
        return ready() and not self.gone

    def _lost(self, error: SplitspecError, span: Span = NO_SPAN) -> None:
        span.fail(error)
        if not self.gone:
            log.warning(
                "draft worker lost",
                worker=self.worker_id,
                error=str(error),
                session=self._session.session_id,
            )
        self._error = error
        self.cancel()


def _end(features: common_pb2.Features) -> int:
    return features.start + features.shape[0]


def _room(features: common_pb2.Features) -> int:
    """How many more tokens' features a message has room for."""
    return _MOST_FEATURE_BYTES * features.shape[0] // len(features.data) - features.shape[0]


def _joined(first: common_pb2.Features, second: common_pb2.Features) -> common_pb2.Features:
    """Both as one message, up to what it has room for. The second begins among the tokens of the first, or
    right after them.
    """
    skipped, row_bytes = _end(first) - second.start, len(second.data) // second.shape[0]
    count = max(0, min(second.shape[0] - skipped, _room(first)))
    data = first.data + second.data[skipped * row_bytes : (skipped + count) * row_bytes]
    shape = [first.shape[0] + count, *first.shape[1:]]
    return common_pb2.Features(start=first.start, shape=shape, dtype=first.dtype, data=data)
