"""The coordinator's two streams of a request: one to the target worker, one to the draft worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import grpc
import structlog

from coordinator.session import Session
from coordinator.stats import Stats, Wait
from coordinator.workers import DraftHost, TargetHost
from protos.v1 import common_pb2, draft_pb2, target_pb2
from splitspec.errors import OutOfSyncError, SplitspecError, UnavailableError, from_rpc_error
from splitspec.serving import EOF
from splitspec.telemetry import NO_SPAN, Span, names
from splitspec.telemetry.names import SpanName

log = structlog.get_logger()

#: A draft worker that owes an answer for longer than this is given up, and looked for again.
_LOST_AFTER_S = 10.0

Response = draft_pb2.DraftSessionResponse
Q = TypeVar("Q")
A = TypeVar("A")


class _Link(Generic[Q, A]):
    """A bidirectional stream with one worker. `call` is the open stream."""

    role = ""

    def __init__(self, worker_id: str, call: Any, session: Session, stats: Stats) -> None:
        self.worker_id = worker_id
        self.handle = ""
        self._call = call
        self._session = session
        self._stats = stats

    async def _write(self, request: Q) -> None:
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        except asyncio.InvalidStateError:
            await self._read()  # raises why the stream has ended
            raise UnavailableError(f"{self._name} ended the stream") from None

    async def _read(self) -> A:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        if response is EOF:
            raise UnavailableError(f"{self._name} ended the stream")
        return response  # type: ignore[no-any-return]

    def _failure(self, error: grpc.aio.AioRpcError) -> SplitspecError:
        """Why the stream ended, as one of our errors."""
        reason = f"{error.code().name}: {error.details()}"
        return from_rpc_error(error) or UnavailableError(f"{self._name}: {reason}")

    @property
    def _name(self) -> str:
        return f"{self.role} worker {self.worker_id}"

    def _waiting(self, name: SpanName) -> AbstractContextManager[Wait]:
        return self._stats.waiting(name, self.role, self.worker_id)

    def _open(self, handle: str, start: int, end: int, lease_ms: int, drafter: str = "") -> common_pb2.Open:
        """An Open that brings the session's tokens from `start` up to `end`."""
        sampling = self._session.sampling
        return common_pb2.Open(
            handle=handle,
            start=start,
            token_ids=self._session.tokens[start:end],
            sampling=sampling.to_proto(),
            rule=sampling.rule.value,
            tenant=self._session.tenant,
            lease_ms=lease_ms,
            drafter=drafter,
        )

    def cancel(self) -> None:
        """Leave at once: the worker sees it within a round."""
        self._call.cancel()


class TargetLink(_Link[target_pb2.TargetSessionRequest, target_pb2.TargetSessionResponse]):
    """The stream to the target worker. Errors of it are errors of the request."""

    role = "target"

    def __init__(
        self, host: TargetHost, session: Session, stats: Stats, timeout_s: float, deadline_s: float | None
    ) -> None:
        """timeout_s: longest wait for an answer. deadline_s: what the client's deadline leaves."""
        super().__init__(host.worker_id, host.stub.TargetSession(timeout=deadline_s), session, stats)
        self.host = host
        self._timeout_s = timeout_s
        #: Plain tokens that were granted and haven't arrived.
        self.outstanding = 0
        self._next_round = 0
        #: Seconds of the target's last pass.
        self.pass_s: float | None = None

    async def open(self, handle: str, held: int, lease_ms: int) -> common_pb2.Opened:
        """Bring the session's tokens to the worker.

        held: leading tokens that it should have under `handle`; what it lacks of them is sent too.
        """
        start, total = held if handle else 0, len(self._session.tokens)
        with self._waiting(names.OPEN) as wait:
            while True:
                message = self._open(handle, start, total, lease_ms)
                request = target_pb2.TargetSessionRequest(
                    stamp=self._session.stamp(), trace=wait.trace, open=message
                )
                await self._write(request)
                opened = (await self._answer("opened")).opened
                self.handle = handle = opened.handle
                if opened.length == total:
                    wait.opened(opened)
                    return opened
                if opened.length >= start:
                    raise OutOfSyncError(f"{self._name} took {opened.length} of {total} tokens")
                start = opened.length

    async def verify(self, proposal: common_pb2.Proposal) -> common_pb2.Verdict:
        """The verdict on a proposal, which is relayed as it came."""
        with self._waiting(names.VERIFY) as wait:
            request = target_pb2.TargetSessionRequest(
                stamp=proposal.stamp, trace=wait.trace, verify=target_pb2.Verify(proposal=proposal)
            )
            self._next_round = proposal.stamp.round
            await self._write(request)
            return await self._verdict(wait)

    async def decode(self, window: int) -> common_pb2.Verdict:
        """The next plain token. Keeps up to `window` tokens granted, so that none waits for a round trip."""
        room = self.host.description.model.max_context - len(self._session.tokens)
        grant = min(window, room) - self.outstanding
        with self._waiting(names.DECODE) as wait:
            if grant > 0:
                request = target_pb2.TargetSessionRequest(
                    stamp=self._session.next_round(grant),
                    trace=wait.trace,
                    decode=target_pb2.Decode(num_tokens=grant),
                )
                if not self.outstanding:
                    self._next_round = request.stamp.round
                self.outstanding += grant
                await self._write(request)
            verdict = await self._verdict(wait)
        self.outstanding -= 1
        return verdict

    async def close(self) -> None:
        """The final cut; the worker keeps the handle for its lease. Tokens beyond the cut are dropped."""
        request = target_pb2.TargetSessionRequest(
            stamp=self._session.stamp(), close=common_pb2.Close(keep_handle=True)
        )
        await self._write(request)
        while (await self._answer(None)).WhichOneof("message") != "closed":
            pass

    async def _verdict(self, wait: Wait) -> common_pb2.Verdict:
        verdict = (await self._answer("verdict")).verdict
        while verdict.stamp.round < self._next_round:
            log.info("stale verdict dropped", session=self._session.session_id, round=verdict.stamp.round)
            verdict = (await self._answer("verdict")).verdict
        if verdict.stamp.round != self._next_round:
            raise OutOfSyncError(
                f"{self._name} sent a verdict on round {verdict.stamp.round}, expected {self._next_round}"
            )
        self._next_round += 1
        wait.verified(verdict)
        self.pass_s = (verdict.timings.model_us + verdict.timings.sampling_us) / 1e6
        return verdict

    async def _answer(self, kind: str | None) -> target_pb2.TargetSessionResponse:
        try:
            response = await asyncio.wait_for(self._read(), self._timeout_s)
        except TimeoutError:
            raise UnavailableError(f"{self._name} didn't answer within {self._timeout_s:g} s") from None
        if kind is not None and response.WhichOneof("message") != kind:
            raise OutOfSyncError(
                f"target worker {self.worker_id} sent {response.WhichOneof('message')}, expected {kind}"
            )
        return response


class DraftLink(_Link[draft_pb2.DraftSessionRequest, draft_pb2.DraftSessionResponse]):
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
        self.drafter = drafter
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
                    wait.opened(response.opened)
                    return response
                if length >= start:
                    raise OutOfSyncError(f"{self._name} took {length} of {stamp.base_length} tokens")
                start = length

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
        # The first answer may wait for the prompt. After a missed proposal only what has arrived counts.
        if await self._settle(0 if self._opened else patience_s, wait.span) is None:
            return None
        stamp = self._session.next_round()
        message = draft_pb2.Propose(
            num_draft_tokens=num_draft_tokens,
            start=self._sent,
            token_ids=self._session.tokens[self._sent :],
            num_accepted=num_accepted,
        )
        self._sent = len(self._session.tokens)
        request = draft_pb2.DraftSessionRequest(stamp=stamp, trace=wait.trace, propose=message)
        self._pending = self._ask(self._exchange(request))
        response = await self._settle(patience_s, wait.span)
        if response is None or response.proposal.stamp.round != stamp.round:
            return None
        return response.proposal

    async def close(self) -> None:
        """The final cut; the worker keeps the handle for its lease. Waits for an answer that is still due."""
        if await self._settle(2.0) is None:
            self.cancel()
            return
        request = draft_pb2.DraftSessionRequest(
            stamp=self._session.stamp(), close=common_pb2.Close(keep_handle=True)
        )
        self._pending = self._ask(self._exchange(request))
        await self._settle(2.0)

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
            if time.monotonic() - self._asked > _LOST_AFTER_S:
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
