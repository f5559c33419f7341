"""The stream to the target worker."""

from __future__ import annotations

import asyncio

import structlog

from coordinator.links.base import Link
from coordinator.session import Session
from coordinator.stats import Stats, Wait
from coordinator.workers import TargetHost
from protos.v1 import common_pb2, target_pb2
from splitspec.errors import OutOfSyncError, UnavailableError
from splitspec.overlap import holds
from splitspec.telemetry import names

log = structlog.get_logger()


class TargetLink(Link[target_pb2.TargetSessionRequest, target_pb2.TargetSessionResponse]):
    """The stream to the target worker. Errors of it are errors of the request."""

    role = "target"

    def __init__(
        self,
        host: TargetHost,
        session: Session,
        stats: Stats,
        timeout_s: float,
        deadline_s: float | None,
        features: common_pb2.FeatureRequest | None = None,
    ) -> None:
        """timeout_s: longest wait for an answer. deadline_s: what the client's deadline leaves.

        features: those that the drafter wants.
        """
        super().__init__(host.worker_id, host.stub.TargetSession(timeout=deadline_s), session, stats)
        self.host = host
        self.features = features
        self._timeout_s = timeout_s
        #: Plain tokens that were granted and haven't arrived.
        self.outstanding = 0
        self._next_round = 0
        #: Seconds of the target's last plain pass.
        self.plain_s: float | None = None
        # Proposals that went out before their parent's verdict: the target verifies the one that holds.
        self._relayed: list[common_pb2.Proposal] = []
        # Round of the last of them that held.
        self._relayed_up_to = 0

    @property
    def room(self) -> int:
        """Tokens that the worker can hold beside those that are committed."""
        return self.host.max_context - len(self._session.tokens)

    async def open(self, handle: str, held: int, lease_ms: int) -> common_pb2.Opened:
        """Bring the session's tokens to the worker.

        held: leading tokens that it should have under `handle`; what it lacks of them is sent too.
        """
        start, total = held if handle else 0, len(self._session.tokens)
        with self._waiting(names.OPEN) as wait:
            while True:
                message = self._open(handle, start, total, lease_ms, features=self.features)
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

    async def verify(self, proposal: common_pb2.Proposal, features_start: int | None) -> common_pb2.Verdict:
        """The verdict on a proposal, which is relayed as it came unless it was before.

        features_start: first token whose features it should bring; None for none.
        """
        with self._waiting(names.VERIFY) as wait:
            self._next_round = proposal.stamp.round
            if proposal.stamp.round > self._relayed_up_to:
                await self._send(proposal, features_start, wait.trace)
            return await self._verdict(wait)

    async def relay(self, proposal: common_pb2.Proposal, features_start: int | None) -> None:
        """Send on a proposal whose parent has no verdict yet. features_start: as for `verify`."""
        self._relayed.append(proposal)
        await self._send(proposal, features_start, self._stats.trace)

    def continued(self) -> common_pb2.Proposal | None:
        """Of the proposals that were relayed the one that holds now, which the target verifies next."""
        parent, drawing = self._session.round, self._session.drawing
        assert drawing is not None
        for proposal in self._relayed:
            if proposal.parent_round == parent and holds(proposal, self._session.tokens, drawing.rule):
                self._relayed = [other for other in self._relayed if other.parent_round > parent]
                self._relayed_up_to = proposal.stamp.round
                return proposal
        self._relayed.clear()
        return None

    async def _send(
        self,
        proposal: common_pb2.Proposal,
        features_start: int | None,
        trace: common_pb2.TraceContext | None,
    ) -> None:
        message = target_pb2.Verify(proposal=proposal, features_start=features_start)
        await self._write(target_pb2.TargetSessionRequest(stamp=proposal.stamp, trace=trace, verify=message))

    async def decode(self, window: int, features_start: int | None) -> common_pb2.Verdict:
        """The next plain token. Keeps up to `window` tokens granted, so that none waits for a round trip.

        features_start: as for `verify`; the last of the tokens granted now brings them.
        """
        if self.room < 1:
            raise UnavailableError(f"{self._name} has no room for more tokens, as {self.host.limit}")
        grant = min(window, self.room) - self.outstanding
        with self._waiting(names.DECODE) as wait:
            if grant > 0:
                request = target_pb2.TargetSessionRequest(
                    stamp=self._session.next_round(grant),
                    trace=wait.trace,
                    decode=target_pb2.Decode(num_tokens=grant, features_start=features_start),
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
        while self._is_stale(verdict.stamp):
            log.info("stale verdict dropped", session=self._session.session_id, round=verdict.stamp.round)
            verdict = (await self._answer("verdict")).verdict
        if verdict.stamp.round != self._next_round:
            raise OutOfSyncError(
                f"{self._name} sent a verdict on round {verdict.stamp.round}, expected {self._next_round}"
            )
        self._next_round += 1
        wait.verified(verdict)
        if not verdict.num_draft_tokens:
            self.plain_s = (verdict.timings.model_us + verdict.timings.sampling_us) / 1e6
        return verdict

    def _is_stale(self, stamp: common_pb2.Stamp) -> bool:
        ours = (self._session.session_id, self._session.epoch)
        return (stamp.session_id, stamp.epoch) != ours or stamp.round < self._next_round

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
