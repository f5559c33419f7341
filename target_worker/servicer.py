"""TargetWorkerService: sessions with their KV, verdicts on proposals, plain decoding within a credit."""

from __future__ import annotations

import grpc
import structlog

from protos.v1 import common_pb2, target_pb2, target_pb2_grpc
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.kv import KV
from splitspec.errors import InvalidRequestError
from splitspec.handles import HandleStore, Held, offered_tokens
from splitspec.model_thread import ModelThread, Timer
from splitspec.serving import EOF
from splitspec.telemetry import Telemetry, names
from splitspec.telemetry.worker import Watch, Work
from splitspec.types import MAX_MESSAGE_BYTES, MAX_NUM_DRAFT_TOKENS, PROTOCOL_VERSION, Drawing, Rule
from splitspec.wire import Draft, seal_key
from target_worker.verifier import verify

log = structlog.get_logger()
Context = grpc.aio.ServicerContext[target_pb2.TargetSessionRequest, target_pb2.TargetSessionResponse]
_SPANS = {"open": names.TARGET_OPEN, "verify": names.TARGET_VERIFY, "decode": names.TARGET_DECODE}


class TargetWorker(target_pb2_grpc.TargetWorkerServiceServicer):
    """Serves one target model. Sessions share the model thread; each has its own KV."""

    def __init__(
        self,
        worker_id: str,
        model: CausalLM,
        telemetry: Telemetry,
        *,
        max_sessions: int,
        prompt_chunk: int,
    ) -> None:
        self.worker_id = worker_id
        self.model = model
        self.thread = ModelThread()
        self.prompt_chunk = prompt_chunk
        self.handles: HandleStore[KV] = HandleStore(max_sessions)
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
            kv_bytes=sum(self.model.kv_bytes(session.state) for session in held),
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
        session: TargetSession | None = None
        try:
            while (request := await context.read()) is not EOF:
                timer = Timer()
                kind = request.WhichOneof("message")
                answer: target_pb2.TargetSessionResponse | None = None
                with self._watch.message(request) as work:
                    if kind == "open":
                        session = session or TargetSession(self, request)
                        opened = await session.open(request, timer)
                        work.opened(opened, request.stamp.base_length)
                        answer = target_pb2.TargetSessionResponse(opened=opened)
                    elif session is None or not session.opened:
                        raise InvalidRequestError.of("message", kind, "open first, until it is complete")
                    elif kind == "verify":
                        verdict = await session.verify(request.stamp, request.verify.proposal, timer)
                        work.verified(verdict)
                        if verdict is not None:
                            answer = target_pb2.TargetSessionResponse(verdict=verdict)
                    elif kind == "decode":
                        await session.decode(request.stamp, request.decode.num_tokens, context, work)
                    elif kind == "close":
                        closed = common_pb2.Closed(length=session.close(request))
                        answer = target_pb2.TargetSessionResponse(closed=closed)
                    else:
                        raise InvalidRequestError.of("message", kind, "open, verify, decode or close")
                if answer is not None:
                    await context.write(answer)
                if kind == "close":
                    return
        finally:
            if session is not None:
                session.detach()


class TargetSession:
    """One stream: the committed tokens, and the KV of all of them but the last."""

    def __init__(self, worker: TargetWorker, request: target_pb2.TargetSessionRequest) -> None:
        self._worker = worker
        self._held: Held[KV] = worker.handles.attach(
            request.stamp, request.open.handle, request.open.tenant, worker.model.new_kv
        )
        self._lease_s = request.open.lease_ms / 1000
        self.opened = False
        # The last verify's round and body with its verdict, for the same message again: a handle has one
        # stream in an epoch, so it ends with the stream.
        self._kept: tuple[tuple[int, bytes], common_pb2.Verdict] | None = None

    async def open(self, request: target_pb2.TargetSessionRequest, timer: Timer) -> common_pb2.Opened:
        """Take over the committed tokens, and feed those but the last that the KV lacks, chunk by chunk.

        Once a session is open a repeated Open takes nothing back.
        """
        held, stamp, model = self._held, request.stamp, self._worker.model
        held.check_epoch(stamp)
        if self.opened:
            return self._answer(held.state.length, timer)
        self._drawing = Drawing.from_proto(request.open)
        self._drawing.check_vocabulary(model.info.vocabulary_size)
        if not 1 <= stamp.base_length < model.info.max_context:
            raise InvalidRequestError.of(
                "open.token_ids", f"{stamp.base_length} tokens", f"1 to {model.info.max_context - 1} tokens"
            )
        offered = offered_tokens(held.tokens, stamp, request.open, model.info.vocabulary_size)
        most = min(offered.same, max(len(offered.tokens) - 1, 0))
        # What is held changes only once the KV is cut: a job that waits is dropped with its stream.
        await self._run(lambda: model.truncate(held.state, min(most, held.state.length)), timer)
        held.tokens = offered.tokens
        kept = held.state.length
        if not offered.complete:
            return self._answer(kept, timer)
        while (fed := held.state.length) < len(held.tokens) - 1:
            chunk = held.tokens[fed : min(fed + self._worker.prompt_chunk, len(held.tokens) - 1)]
            await self._run(lambda chunk=chunk: model.forward(held.state, chunk, num_rows=0), timer)
        held.revision, held.round = stamp.revision, stamp.round
        self.opened = True
        return self._answer(kept, timer)

    def _answer(self, cached_length: int, timer: Timer) -> common_pb2.Opened:
        held = self._held
        return common_pb2.Opened(
            handle=held.handle,
            length=len(held.tokens),
            cached_length=cached_length,
            timings=timer.to_proto(),
        )

    async def verify(
        self, stamp: common_pb2.Stamp, proposal: common_pb2.Proposal, timer: Timer
    ) -> common_pb2.Verdict | None:
        """The verdict on a proposal, or None for a stale one, which gets no answer."""
        held = self._held
        held.check_epoch(stamp)
        held.check_epoch(proposal.stamp)
        key = (proposal.stamp.round, proposal.body)
        if self._kept is not None and self._kept[0] == key:
            repeated = common_pb2.Verdict(repeated=True)
            repeated.MergeFrom(self._kept[1])
            return repeated
        if (
            proposal.stamp.round <= held.round
            or proposal.stamp.revision < held.revision
            or proposal.stamp.base_length < len(held.tokens)
        ):
            log.info("stale proposal dropped", session=held.session_id, round=proposal.stamp.round)
            return None
        held.check_prefix(proposal.stamp)
        if proposal.parent_round or proposal.more_follows:
            raise InvalidRequestError.of(
                "proposal.parent_round", proposal.parent_round, "0: this worker verifies in sequence"
            )
        info = self._worker.model.info
        sealing = seal_key(self._drawing, info.vocabulary_hash, proposal.stamp.prefix_hash)
        draft, num_one_hot, mismatch = Draft.decode(proposal.body, sealing, info.vocabulary_size)
        if draft.parents:
            raise InvalidRequestError.of("proposal.parents", list(draft.parents), "a chain (no parents)")
        most = min(MAX_NUM_DRAFT_TOKENS, info.max_context - len(held.tokens))
        if len(draft.token_ids) != proposal.num_draft_tokens or proposal.num_draft_tokens > most:
            value = f"{proposal.num_draft_tokens} with {len(draft.token_ids)} in the body"
            raise InvalidRequestError.of("proposal.num_draft_tokens", value, f"equal numbers, at most {most}")
        verdict = await self._verdict(proposal.stamp.round, draft, timer)
        verdict.num_one_hot, verdict.seal_mismatch = num_one_hot, mismatch
        self._kept = (key, verdict)
        return verdict

    async def decode(self, stamp: common_pb2.Stamp, num_tokens: int, context: Context, work: Work) -> None:
        """One verdict for each plain token; token j is round stamp.round + j."""
        held = self._held
        held.check_epoch(stamp)
        if stamp.round <= held.round:
            log.info("stale decode dropped", session=held.session_id, round=stamp.round)
            work.dropped()
            return
        room = self._worker.model.info.max_context - len(held.tokens)
        if not 1 <= num_tokens <= room:
            raise InvalidRequestError.of(
                "decode.num_tokens", num_tokens, f"1 to {room}, what the context leaves"
            )
        work.granted(num_tokens)
        for round_number in range(stamp.round, stamp.round + num_tokens):
            verdict = await self._verdict(round_number, Draft.certain(()), Timer())
            work.decoded(verdict)
            await context.write(target_pb2.TargetSessionResponse(verdict=verdict))

    def close(self, request: target_pb2.TargetSessionRequest) -> int:
        """The final cut: the committed length is shortened to base_length; returns what stays held."""
        held = self._held
        held.check_epoch(request.stamp)
        if request.stamp.base_length > len(held.tokens):
            held.check_prefix(request.stamp)
        held.tokens.truncate(request.stamp.base_length)
        if not request.close.keep_handle:
            self._lease_s = 0
        return len(held.tokens) if self._lease_s else 0

    def detach(self) -> None:
        self._worker.handles.detach(self._held, self._lease_s)

    async def _verdict(self, round_number: int, draft: Draft, timer: Timer) -> common_pb2.Verdict:
        held, worker = self._held, self._worker
        verified = await self._run(
            lambda: verify(worker.model, held.state, held.tokens, draft, self._drawing, round_number, timer),
            timer,
        )
        outcome = verified.outcome
        held.tokens.extend(verified.committed)
        held.revision += 1
        held.round = round_number
        return common_pb2.Verdict(
            stamp=held.stamp(),
            num_draft_tokens=len(draft.token_ids),
            num_accepted=outcome.num_accepted,
            path=outcome.path if draft.parents else (),
            token_ids=verified.committed,
            next_origin=outcome.next_origin.value,
            rule=verified.rule.value,
            timings=timer.to_proto(),
            logprobs=[logprobs.to_proto() for logprobs in verified.logprobs],
        )

    async def _run(self, job, timer: Timer):  # type: ignore[no-untyped-def]
        """A job on the model thread; StaleError when the session got a new owner in the meantime."""
        result = await self._worker.thread.run(job, timer)
        if self._held.fenced:
            self._held.check_epoch(self._held.stamp())
        return result
