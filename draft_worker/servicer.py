"""DraftWorkerService: sessions with their drafter state, a proposal for each round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from draft_worker.drafters.base import Drafter
from draft_worker.drawing import DraftCounterNoise
from protos.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from splitspec.errors import InvalidRequestError, NotFoundError, OutOfSyncError
from splitspec.handles import HandleStore, Held, offered_tokens
from splitspec.model_thread import ModelThread, Timer
from splitspec.serving import EOF
from splitspec.telemetry import Telemetry, names
from splitspec.telemetry.worker import Watch
from splitspec.types import MAX_MESSAGE_BYTES, MAX_NUM_DRAFT_TOKENS, PROTOCOL_VERSION, Drawing
from splitspec.wire import seal_key

log = structlog.get_logger()
Context = grpc.aio.ServicerContext[draft_pb2.DraftSessionRequest, draft_pb2.DraftSessionResponse]
_SPANS = {"open": names.DRAFT_OPEN, "propose": names.DRAFT_PROPOSE}


@dataclass(eq=False)
class Drafting:
    """A drafter with its state for one session."""

    drafter: Drafter
    state: Any


class DraftWorker(draft_pb2_grpc.DraftWorkerServiceServicer):
    """Serves one or more drafters, by name. Sessions share the model thread; each has its own state."""

    def __init__(
        self,
        worker_id: str,
        drafters: Mapping[str, Drafter],
        telemetry: Telemetry,
        *,
        max_sessions: int,
        prompt_chunk: int,
    ) -> None:
        self.worker_id = worker_id
        self.drafters = drafters
        self.thread = ModelThread()
        self.prompt_chunk = prompt_chunk
        self.handles: HandleStore[Drafting] = HandleStore(max_sessions)
        self._max_sessions = max_sessions
        self._watch = Watch(telemetry, worker_id, _SPANS)
        telemetry.metrics.watch_load(self._load)

    def describe(self) -> draft_pb2.DraftWorkerServiceDescribeResponse:
        """The handshake, also written to the worker directory."""
        self.handles.reap()
        return draft_pb2.DraftWorkerServiceDescribeResponse(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            drafters=[drafter.info for drafter in self.drafters.values()],
            limits=common_pb2.WorkerLimits(
                max_sessions=self._max_sessions,
                max_num_draft_tokens=MAX_NUM_DRAFT_TOKENS,
                max_message_bytes=MAX_MESSAGE_BYTES,
            ),
            load=self._load(),
        )

    def _load(self) -> common_pb2.WorkerLoad:
        """What is held at the moment; reads only, so that the metrics' thread may ask, too."""
        held = [session.state for session in self.handles.held]
        return common_pb2.WorkerLoad(
            live_sessions=self.handles.num_attached,
            handles=len(held),
            kv_tokens=sum(drafting.drafter.held_tokens(drafting.state) for drafting in held),
            kv_bytes=sum(drafting.drafter.held_bytes(drafting.state) for drafting in held),
        )

    async def Describe(
        self,
        request: draft_pb2.DraftWorkerServiceDescribeRequest,
        context: grpc.aio.ServicerContext[
            draft_pb2.DraftWorkerServiceDescribeRequest, draft_pb2.DraftWorkerServiceDescribeResponse
        ],
    ) -> draft_pb2.DraftWorkerServiceDescribeResponse:
        return self.describe()

    async def Release(
        self,
        request: draft_pb2.DraftWorkerServiceReleaseRequest,
        context: grpc.aio.ServicerContext[
            draft_pb2.DraftWorkerServiceReleaseRequest, draft_pb2.DraftWorkerServiceReleaseResponse
        ],
    ) -> draft_pb2.DraftWorkerServiceReleaseResponse:
        released = self.handles.release(request.handle, request.stamp)
        return draft_pb2.DraftWorkerServiceReleaseResponse(released=released)

    async def DraftSession(self, requests: object, context: Context) -> None:  # type: ignore[override]
        session: DraftSession | None = None
        try:
            while (request := await context.read()) is not EOF:
                timer = Timer()
                kind = request.WhichOneof("message")
                answer: draft_pb2.DraftSessionResponse | None = None
                with self._watch.message(request) as work:
                    if kind == "open":
                        session = session or DraftSession(self, request)
                        opened = await session.open(request, timer)
                        work.opened(opened, request.stamp.base_length)
                        answer = draft_pb2.DraftSessionResponse(opened=opened)
                    elif session is None or not session.opened:
                        raise InvalidRequestError.of("message", kind, "open first, until it is complete")
                    elif kind == "propose":
                        proposal = await session.propose(request, timer)
                        work.proposed(proposal)
                        if proposal is not None:
                            answer = draft_pb2.DraftSessionResponse(proposal=proposal)
                    elif kind == "close":
                        closed = common_pb2.Closed(length=session.close(request))
                        answer = draft_pb2.DraftSessionResponse(closed=closed)
                    else:
                        raise InvalidRequestError.of("message", kind, "open, propose or close")
                if answer is not None:
                    await context.write(answer)
                if kind == "close":
                    return
        finally:
            if session is not None:
                session.detach()

    def drafter(self, name: str) -> Drafter:
        """The drafter that a session names."""
        try:
            return self.drafters[name]
        except KeyError:
            known = ", ".join(sorted(self.drafters))
            raise NotFoundError(
                f"drafter {name!r} is unknown here, expected one of: {known}", field="drafter"
            ) from None


class DraftSession:
    """One stream: the committed tokens, and the drafter's state for them."""

    def __init__(self, worker: DraftWorker, request: draft_pb2.DraftSessionRequest) -> None:
        self._worker = worker
        drafter = worker.drafter(request.open.drafter)
        self._held: Held[Drafting] = worker.handles.attach(
            request.stamp, request.open.handle, request.open.tenant, lambda: Drafting(drafter, drafter.open())
        )
        if self._held.state.drafter is not drafter:
            # The session's last request had another drafter: its state is of no use to this one.
            self._held.state = Drafting(drafter, drafter.open())
        self._lease_s = request.open.lease_ms / 1000
        self.opened = False

    async def open(self, request: draft_pb2.DraftSessionRequest, timer: Timer) -> common_pb2.Opened:
        """Take over the committed tokens, and feed them chunk by chunk.

        Once a session is open a repeated Open takes nothing back.
        """
        held, drafting = self._held, self._held.state
        held.check_epoch(request.stamp)
        if self.opened:
            return self._answer(len(held.tokens), timer)
        self._drawing = Drawing.from_proto(request.open)
        offered = offered_tokens(held.tokens, request.stamp, request.open, self._vocabulary_size)
        held.tokens = offered.tokens
        cached = min(offered.same, drafting.drafter.held_tokens(drafting.state))
        if not offered.complete:
            return self._answer(cached, timer)
        fed = cached
        while fed < len(held.tokens):
            fed = min(fed + self._worker.prompt_chunk, len(held.tokens))
            await self._run(lambda n=fed: drafting.drafter.feed(drafting.state, held.tokens[:n]), timer)
        held.revision, held.round = request.stamp.revision, request.stamp.round
        self.opened = True
        return self._answer(cached, timer)

    def _answer(self, cached_length: int, timer: Timer) -> common_pb2.Opened:
        held = self._held
        return common_pb2.Opened(
            handle=held.handle,
            length=len(held.tokens),
            cached_length=cached_length,
            timings=timer.to_proto(),
        )

    async def propose(
        self, request: draft_pb2.DraftSessionRequest, timer: Timer
    ) -> common_pb2.Proposal | None:
        """A proposal on the stamp's committed tokens, or None for a stale request, which gets no answer."""
        held, stamp, message = self._held, request.stamp, request.propose
        held.check_epoch(stamp)
        if stamp.round <= held.round or message.start < len(held.tokens):
            log.info("stale propose dropped", session=held.session_id, round=stamp.round)
            return None
        if not 1 <= message.num_draft_tokens <= MAX_NUM_DRAFT_TOKENS:
            raise InvalidRequestError.of(
                "propose.num_draft_tokens", message.num_draft_tokens, f"1 to {MAX_NUM_DRAFT_TOKENS}"
            )
        if message.start > len(held.tokens):
            raise OutOfSyncError(
                f"propose.start is {message.start}, but the worker holds {len(held.tokens)} tokens"
            )
        for token in message.token_ids:
            if token >= self._vocabulary_size:
                raise InvalidRequestError.of(
                    "propose.token_ids", token, f"an id below {self._vocabulary_size}"
                )
        held.tokens.extend(message.token_ids)
        held.check_prefix(stamp)
        held.revision, held.round = stamp.revision, stamp.round
        drafter, state = held.state.drafter, held.state.state
        noise = DraftCounterNoise(self._drawing.seed, stamp.round)
        draft = await self._run(
            lambda: drafter.propose(state, held.tokens, message.num_draft_tokens, self._drawing, noise),
            timer,
        )
        key = seal_key(self._drawing, drafter.info.model.vocabulary_hash, stamp.prefix_hash)
        return common_pb2.Proposal(
            stamp=stamp,
            num_draft_tokens=len(draft.token_ids),
            drafter=drafter.info.name,
            body=draft.encode(key),
            timings=timer.to_proto(),
        )

    def close(self, request: draft_pb2.DraftSessionRequest) -> int:
        """The final cut: the committed length is shortened to base_length; returns what stays held."""
        held = self._held
        held.check_epoch(request.stamp)
        # The draft worker may not have been told the last tokens yet; the next Open brings them.
        held.tokens.truncate(min(request.stamp.base_length, len(held.tokens)))
        if not request.close.keep_handle:
            self._lease_s = 0
        return len(held.tokens) if self._lease_s else 0

    def detach(self) -> None:
        self._worker.handles.detach(self._held, self._lease_s)

    @property
    def _vocabulary_size(self) -> int:
        """Ids of the drafter's model; a drafter without one takes whatever the target commits."""
        model = self._held.state.drafter.info.model
        return model.vocabulary_size or 2**32

    async def _run(self, job, timer: Timer):  # type: ignore[no-untyped-def]
        """A job on the model thread; StaleError when the session got a new owner in the meantime."""
        result = await self._worker.thread.run(job, timer)
        if self._held.fenced:
            self._held.check_epoch(self._held.stamp())
        return result
