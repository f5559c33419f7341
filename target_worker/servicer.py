"""TargetWorkerService: sessions with their KV, verdicts on proposals, plain decoding within a credit."""

from __future__ import annotations

import asyncio

import grpc
import structlog

from protos.v1 import common_pb2, target_pb2, target_pb2_grpc
from splitspec.engine.kv import KV
from splitspec.engine.paged import PagedLM
from splitspec.engine.scheduler import Scheduler, Steps, Timer
from splitspec.errors import InvalidRequestError
from splitspec.handles import HandleStore
from splitspec.overlap import begins_with
from splitspec.telemetry import Telemetry, names
from splitspec.telemetry.worker import Watch, Work
from splitspec.tokens import TokenLog
from splitspec.types import MAX_MESSAGE_BYTES, MAX_NUM_DRAFT_TOKENS, PROTOCOL_VERSION, Drawing, Rule
from splitspec.wire import Draft, seal_key
from splitspec.worker_session import WorkerSession, Write, serve_session
from target_worker.features import FeatureReader
from target_worker.verifier import Verified, decode, take_over, verify

log = structlog.get_logger()
Context = grpc.aio.ServicerContext[target_pb2.TargetSessionRequest, target_pb2.TargetSessionResponse]
_SPANS = {"open": names.TARGET_OPEN, "verify": names.TARGET_VERIFY, "decode": names.TARGET_DECODE}


class TargetWorker(target_pb2_grpc.TargetWorkerServiceServicer):
    """Serves one target model. Sessions share the model thread; each has its own KV."""

    def __init__(
        self,
        worker_id: str,
        model: PagedLM,
        telemetry: Telemetry,
        *,
        max_sessions: int,
        max_positions: int,
    ) -> None:
        self.worker_id = worker_id
        self.model = model
        self.scheduler = Scheduler(max_positions=max_positions)
        self.handles: HandleStore[KV] = HandleStore(
            max_sessions, let_go=lambda kv: self.scheduler.post(kv.free)
        )
        self._max_sessions = max_sessions
        self._watch = Watch(telemetry, worker_id, _SPANS)
        telemetry.metrics.watch_load(self._load)

    def describe(self) -> target_pb2.TargetWorkerServiceDescribeResponse:
        """The handshake, also written to the worker directory."""
        self.handles.reap()
        return target_pb2.TargetWorkerServiceDescribeResponse(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            model=self.model.info,
            rules=[rule.value for rule in Rule],
            limits=common_pb2.WorkerLimits(
                max_sessions=self._max_sessions,
                max_num_draft_tokens=MAX_NUM_DRAFT_TOKENS,
                max_message_bytes=MAX_MESSAGE_BYTES,
            ),
            load=self._load(),
        )

    def _load(self) -> common_pb2.WorkerLoad:
        """What is held at the moment; reads only, so that the metrics' thread may ask, too."""
        held = self.handles.held
        return common_pb2.WorkerLoad(
            live_sessions=self.handles.num_attached,
            handles=len(held),
            kv_tokens=sum(session.state.length for session in held),
            kv_bytes=sum(session.state.num_bytes for session in held),
            kv_blocks_used=self.model.pool.num_used,
            kv_blocks_shared=self.model.pool.num_shared,
            kv_blocks_cached=self.model.pool.num_cached,
            kv_blocks_free=self.model.pool.num_free,
        )

    async def Describe(
        self,
        request: target_pb2.TargetWorkerServiceDescribeRequest,
        context: grpc.aio.ServicerContext[
            target_pb2.TargetWorkerServiceDescribeRequest, target_pb2.TargetWorkerServiceDescribeResponse
        ],
    ) -> target_pb2.TargetWorkerServiceDescribeResponse:
        return self.describe()

    async def Release(
        self,
        request: target_pb2.TargetWorkerServiceReleaseRequest,
        context: grpc.aio.ServicerContext[
            target_pb2.TargetWorkerServiceReleaseRequest, target_pb2.TargetWorkerServiceReleaseResponse
        ],
    ) -> target_pb2.TargetWorkerServiceReleaseResponse:
        released = self.handles.release(request.handle, request.stamp)
        return target_pb2.TargetWorkerServiceReleaseResponse(released=released)

    async def TargetSession(self, requests: object, context: Context) -> None:  # type: ignore[override]
        await serve_session(
            context,
            self._watch,
            lambda request: TargetSession(self, request),
            target_pb2.TargetSessionResponse,
        )


class TargetSession(WorkerSession[KV]):
    """One stream: the committed tokens, and the KV of all of them but the last."""

    def __init__(self, worker: TargetWorker, request: target_pb2.TargetSessionRequest) -> None:
        tenant = request.open.tenant
        super().__init__(worker.handles, worker.scheduler, request, lambda: worker.model.new_kv(tenant))
        self._model = worker.model
        # The last verify's round, text and body with its verdict, for the same message again: a handle has
        # one stream in an epoch, so it ends with the stream.
        self._kept: tuple[tuple[int, int, bytes], common_pb2.Verdict] | None = None

    @property
    def vocabulary_size(self) -> int:
        return self._model.info.vocabulary_size

    def prepare(self, request: target_pb2.TargetSessionRequest) -> None:
        self._drawing = Drawing.from_proto(request.open)
        self._drawing.check_vocabulary(self.vocabulary_size)
        self._features = FeatureReader(self._model, request.open.features)
        most = self._model.info.max_context - 1
        if not 1 <= request.stamp.base_length <= most:
            raise InvalidRequestError.of(
                "open.token_ids", f"{request.stamp.base_length} tokens", f"1 to {most} tokens"
            )

    def rest(self) -> None:
        self.held.state.rest()

    def close(self, request: target_pb2.TargetSessionRequest) -> int:
        """See WorkerSession. All that is cut to was committed here. Raises OutOfSyncError."""
        self.held.check_epoch(request.stamp)
        if request.stamp.base_length > len(self.held.tokens):
            self.held.check_prefix(request.stamp)
        return super().close(request)

    def take_over(self, tokens: TokenLog) -> Steps[int]:
        return take_over(self._model, self.held.state, tokens)

    async def answer(
        self,
        kind: str,
        request: target_pb2.TargetSessionRequest,
        timer: Timer,
        work: Work,
        write: Write,
    ) -> target_pb2.TargetSessionResponse | None:
        if kind == "verify":
            verdict = await self._verify(request.stamp, request.verify, timer)
            work.verified(verdict)
            return None if verdict is None else target_pb2.TargetSessionResponse(verdict=verdict)
        if kind == "decode":
            await self._decode(request.stamp, request.decode, timer, work, write)
            return None
        raise InvalidRequestError.of("message", kind, "open, verify, decode or close")

    async def _verify(
        self, stamp: common_pb2.Stamp, message: target_pb2.Verify, timer: Timer
    ) -> common_pb2.Verdict | None:
        """The verdict on a proposal, or None for a stale one, which gets no answer."""
        held, proposal = self.held, message.proposal
        held.check_epoch(stamp)
        held.check_epoch(proposal.stamp)
        key = (proposal.stamp.round, proposal.stamp.prefix_hash, proposal.body)
        if self._kept is not None and self._kept[0] == key:
            repeated = common_pb2.Verdict(repeated=True)
            repeated.MergeFrom(self._kept[1])
            return repeated
        first = self._begins_with(proposal)
        if first is None:
            log.debug("stale proposal dropped", session=held.session_id, round=proposal.stamp.round)
            return None
        start = self._features.start("verify", message, len(held.tokens))
        draft, num_one_hot, mismatch = self._draft(proposal)
        if first:  # of a chain: what else hangs on the root of a tree was not drafted for this
            if draft.parents or draft.token_ids[:1] != first:
                return None
            draft = draft.after(1)
        hold_bonus = proposal.more_follows and self._drawing.rule in (Rule.TOKEN, Rule.BLOCK)

        def steps() -> Steps[tuple[Verified, common_pb2.Features | None]]:
            round_number = proposal.stamp.round
            verified = yield from verify(
                self._model, held.state, held.tokens, draft, self._drawing, round_number, timer, hold_bonus
            )
            return verified, self._features.read(held.state, start)

        verdict = self._commit(proposal.stamp.round, *await self.run(steps(), timer))
        verdict.timings.CopyFrom(timer.to_proto())
        verdict.num_one_hot, verdict.seal_mismatch = num_one_hot, mismatch
        self._kept = (key, verdict)
        return verdict

    def _begins_with(self, proposal: common_pb2.Proposal) -> tuple[int, ...] | None:
        """See `overlap.begins_with`; None for a stale proposal.

        Raises OutOfSyncError for a proposal without a parent on other tokens than those that are held.
        """
        held, stamp = self.held, proposal.stamp
        if stamp.round <= held.round:
            return None
        if proposal.parent_round:
            continues = proposal.parent_round == held.round
            return begins_with(stamp, held.tokens, self._drawing.rule) if continues else None
        if stamp.revision < held.revision or stamp.base_length < len(held.tokens):
            return None
        held.check_prefix(stamp)
        return ()

    def _draft(self, proposal: common_pb2.Proposal) -> tuple[Draft, int, bool]:
        """What `Draft.decode` makes of it. Raises InvalidRequestError for what can't be verified."""
        info = self._model.info
        key = seal_key(self._drawing, info.vocabulary_hash, proposal.stamp.prefix_hash)
        decoded = Draft.decode(proposal.body, key, info.vocabulary_size)
        most = min(MAX_NUM_DRAFT_TOKENS, info.max_context - len(self.held.tokens))
        count = len(decoded[0].token_ids)
        if count != proposal.num_draft_tokens or count > most:
            value = f"{proposal.num_draft_tokens} with {count} in the body"
            raise InvalidRequestError.of("proposal.num_draft_tokens", value, f"equal numbers, at most {most}")
        return decoded

    async def _decode(
        self, stamp: common_pb2.Stamp, message: target_pb2.Decode, timer: Timer, work: Work, write: Write
    ) -> None:
        """One verdict for each plain token; token j is round stamp.round + j."""
        held, num_tokens = self.held, message.num_tokens
        held.check_epoch(stamp)
        if stamp.round <= held.round:
            log.info("stale decode dropped", session=held.session_id, round=stamp.round)
            work.dropped()
            return
        room = self._model.info.max_context - len(held.tokens)
        if not 1 <= num_tokens <= room:
            raise InvalidRequestError.of(
                "decode.num_tokens", num_tokens, f"1 to {room}, what the context leaves"
            )
        start = self._features.start("decode", message, len(held.tokens))
        work.granted(num_tokens)
        rounds = range(stamp.round, stamp.round + num_tokens)
        loop = asyncio.get_running_loop()
        drawn: asyncio.Queue[
            tuple[int, Verified, common_pb2.Features | None, common_pb2.ServerTimings] | None
        ] = asyncio.Queue()

        def emit(round_number: int, verified: Verified) -> None:
            features = self._features.read(held.state, start) if round_number == rounds[-1] else None
            token = (round_number, verified, features, timer.lap())
            loop.call_soon_threadsafe(drawn.put_nowait, token)

        steps = decode(self._model, held.state, held.tokens, self._drawing, rounds, timer, emit)
        job = asyncio.create_task(self.run(steps, timer))
        job.add_done_callback(lambda _: drawn.put_nowait(None))
        try:
            while (token := await drawn.get()) is not None:
                self.check_fence()
                round_number, verified, features, timings = token
                verdict = self._commit(round_number, verified, features)
                verdict.timings.CopyFrom(timings)
                work.decoded(verdict)
                await write(target_pb2.TargetSessionResponse(verdict=verdict))
            await job
        finally:
            job.cancel()

    def _commit(
        self, round_number: int, verified: Verified, features: common_pb2.Features | None
    ) -> common_pb2.Verdict:
        held, outcome, origin = self.held, verified.outcome, verified.next_origin
        held.tokens.extend(verified.committed)
        held.revision += 1
        held.round = round_number
        return common_pb2.Verdict(
            stamp=held.stamp(),
            num_draft_tokens=outcome.num_draft_tokens,
            num_accepted=outcome.num_accepted,
            path=verified.path,
            token_ids=verified.committed,
            next_origin=origin.value if origin is not None else common_pb2.TOKEN_ORIGIN_UNSPECIFIED,
            rule=verified.rule.value,
            logprobs=[logprobs.to_proto() for logprobs in verified.logprobs],
            features=features,
        )
