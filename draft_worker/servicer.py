"""DraftWorkerService: sessions with their drafter state, a proposal for each round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc
import structlog
import torch

from draft_worker.ahead import Ahead, Branch
from draft_worker.drafters.base import Drafter, FeatureDrafter
from protos.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from splitspec.engine.scheduler import Scheduler, Steps, Timer
from splitspec.errors import InvalidRequestError, NotFoundError, OutOfSyncError
from splitspec.features import FeatureFormat
from splitspec.handles import HandleStore
from splitspec.limits import check_names
from splitspec.telemetry import Telemetry, names
from splitspec.telemetry.worker import Watch, Work
from splitspec.tokens import TokenLog
from splitspec.types import (
    MAX_MESSAGE_BYTES,
    MAX_NUM_AHEAD,
    MAX_NUM_DRAFT_TOKENS,
    PROTOCOL_VERSION,
    Drawing,
    Mode,
)
from splitspec.wire import Draft
from splitspec.worker_session import WorkerSession, Write, serve_session

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
        max_positions: int,
    ) -> None:
        self.worker_id = worker_id
        self.drafters = drafters
        self.scheduler = Scheduler(max_positions=max_positions)
        self.handles: HandleStore[Drafting] = HandleStore(
            max_sessions, let_go=lambda held: self.scheduler.post(lambda: held.drafter.free(held.state))
        )
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
        pools = [pool for drafter in self.drafters.values() for pool in drafter.pools]
        return common_pb2.WorkerLoad(
            live_sessions=self.handles.num_attached,
            handles=len(held),
            kv_tokens=sum(drafting.drafter.held_tokens(drafting.state) for drafting in held),
            kv_bytes=sum(drafting.drafter.held_bytes(drafting.state) for drafting in held),
            kv_blocks_used=sum(pool.num_used for pool in pools),
            kv_blocks_shared=sum(pool.num_shared for pool in pools),
            kv_blocks_cached=sum(pool.num_cached for pool in pools),
            kv_blocks_free=sum(pool.num_free for pool in pools),
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
        await serve_session(
            context,
            self._watch,
            lambda request: DraftSession(self, request),
            draft_pb2.DraftSessionResponse,
        )

    def drafter(self, name: str) -> Drafter:
        """The drafter that a session names. Raises InvalidRequestError, NotFoundError."""
        check_names(open__drafter=name)
        try:
            return self.drafters[name]
        except KeyError:
            known = ", ".join(sorted(self.drafters))
            raise NotFoundError(
                f"drafter {name!r} is unknown here, expected one of: {known}", field="drafter"
            ) from None


class DraftSession(WorkerSession[Drafting]):
    """One stream: the committed tokens, and the drafter's state for them."""

    def __init__(self, worker: DraftWorker, request: draft_pb2.DraftSessionRequest) -> None:
        drafter, tenant = worker.drafter(request.open.drafter), request.open.tenant

        def begin() -> Drafting:
            return Drafting(drafter, drafter.open(tenant))

        super().__init__(worker.handles, worker.scheduler, request, begin)
        if self.held.state.drafter is not drafter:
            # The session's last request had another drafter: its state is of no use to this one.
            self.held.state = begin()
        self._drafter = drafter
        self._ahead: Ahead | None = None
        self._features = FeatureFormat.from_proto(drafter.info.features)

    @property
    def _state(self) -> Any:
        return self.held.state.state

    @property
    def vocabulary_size(self) -> int:
        """Ids of the drafter's model; a drafter without one takes whatever the target commits."""
        return self._drafter.info.model.vocabulary_size or 2**32

    @property
    def features_length(self) -> int:
        return 0 if self._features is None else self._feature_drafter.held_features(self._state)

    @property
    def _feature_drafter(self) -> FeatureDrafter:
        return cast(FeatureDrafter, self._drafter)

    def prepare(self, request: draft_pb2.DraftSessionRequest) -> None:
        self._drawing = Drawing.from_proto(request.open)
        self._ahead = Ahead(self._drafter, self._drawing, self.run)

    def detach(self) -> None:
        if self._ahead is not None:
            self._ahead.drop()
            # It refers to this session, whose logits would stay until all of Python's objects are searched.
            self._ahead = None
        super().detach()

    def rest(self) -> None:
        self._drafter.rest(self._state)

    def take_over(self, tokens: TokenLog) -> Steps[int]:
        return self._drafter.feed(self._state, tokens)

    async def answer(
        self,
        kind: str,
        request: draft_pb2.DraftSessionRequest,
        timer: Timer,
        work: Work,
        write: Write,
    ) -> draft_pb2.DraftSessionResponse | None:
        if kind != "propose":
            raise InvalidRequestError.of("message", kind, "open, propose or close")
        branch = await self._propose(request, timer, write)
        work.proposed(None if branch is None else branch.proposal)
        if branch is None or branch.sent:
            return None
        return draft_pb2.DraftSessionResponse(proposal=branch.proposal)

    async def _propose(
        self, request: draft_pb2.DraftSessionRequest, timer: Timer, write: Write
    ) -> Branch | None:
        """The proposal on the stamp's committed tokens, which may have been sent; None for a stale request.

        In modes that overlap, others are drafted from here on.
        """
        held, stamp, message = self.held, request.stamp, request.propose
        held.check_epoch(stamp)
        if stamp.round <= held.round or message.start < len(held.tokens):
            log.info("stale propose dropped", session=held.session_id, round=stamp.round)
            return None
        self._check(message)
        mode = self._mode(message)
        features = self._decoded(message, stamp.base_length) if message.HasField("features") else None
        held.tokens.extend(message.token_ids)
        held.check_prefix(stamp)
        held.revision, held.round = stamp.revision, stamp.round
        assert self._ahead is not None
        branch = await self._ahead.turn(stamp.round, held.tokens)
        if branch is None:
            branch = Branch(
                stamp, held.tokens[:], self._state, message.num_draft_tokens, self._ahead.more_follows(mode)
            )
            steps = None
            if features is not None:
                steps = self._with_features(message.features.start, features, branch)
            await self._ahead.draft(branch, timer, steps)
        elif features is not None:  # they come too late for it, but not for what goes on from it
            await self.run(self._take_features(branch.state, message.features.start, features), timer)
        held.state.state = branch.state

        async def send(proposal: common_pb2.Proposal) -> None:
            await write(draft_pb2.DraftSessionResponse(proposal=proposal))

        self._ahead.go_on(branch, mode, message.num_ahead, send)
        return branch

    def _check(self, message: draft_pb2.Propose) -> None:
        """Raise InvalidRequestError or OutOfSyncError for what can't be drafted."""
        if not 1 <= message.num_draft_tokens <= MAX_NUM_DRAFT_TOKENS:
            raise InvalidRequestError.of(
                "propose.num_draft_tokens", message.num_draft_tokens, f"1 to {MAX_NUM_DRAFT_TOKENS}"
            )
        if message.start > len(self.held.tokens):
            raise OutOfSyncError(
                f"propose.start is {message.start}, but the worker holds {len(self.held.tokens)} tokens"
            )
        for token in message.token_ids:
            if token >= self.vocabulary_size:
                raise InvalidRequestError.of(
                    "propose.token_ids", token, f"an id below {self.vocabulary_size}"
                )

    def _mode(self, message: draft_pb2.Propose) -> Mode:
        """What to do ahead of the next Propose. Raises InvalidRequestError for what the drafter can't do."""
        mode = Mode.named(message.mode, "propose.mode") or Mode.SEQUENTIAL
        if mode in (Mode.PLAIN, Mode.SEQUENTIAL):
            return Mode.SEQUENTIAL
        info = self._drafter.info
        if mode.value not in info.modes:
            known = ["sequential", *(Mode(value).name.lower() for value in info.modes)]
            raise InvalidRequestError.of(
                "propose.mode", mode.name.lower(), f"one that {info.name} has: {', '.join(known)}"
            )
        if not 1 <= message.num_ahead <= MAX_NUM_AHEAD:
            raise InvalidRequestError.of("propose.num_ahead", message.num_ahead, f"1 to {MAX_NUM_AHEAD}")
        return mode

    def _decoded(self, message: draft_pb2.Propose, base_length: int) -> torch.Tensor:
        """The features of a Propose. Raises InvalidRequestError for those that weren't wanted or can't be."""
        start, shape = message.features.start, list(message.features.shape)
        if self._features is None:
            expected = f"none, as {self._drafter.info.name} drafts without"
            raise InvalidRequestError.of("propose.features", f"features of shape {shape}", expected)
        features = self._features.decode(message.features)
        if start + len(features) >= base_length:
            expected = f"tokens before the last of the {base_length} committed ones"
            raise InvalidRequestError.of(
                "propose.features", f"{len(features)} tokens from {start} on", expected
            )
        return features

    def _with_features(self, start: int, features: torch.Tensor, branch: Branch) -> Steps[Draft]:
        """Hand features over, and then make a branch's proposal."""
        assert self._ahead is not None
        yield from self._take_features(branch.state, start, features)
        return (yield from self._ahead.steps(branch))

    def _take_features(self, state: Any, start: int, features: torch.Tensor) -> Steps[None]:
        """Hand features over. Raises OutOfSyncError when some before them are left out."""
        yield from self._drafter.feed(state, self.held.tokens)
        held = self._feature_drafter.held_features(state)
        if start > held:
            raise OutOfSyncError(
                f"propose.features.start is {start}, but the worker holds those of {held} tokens"
            )
        self._feature_drafter.take_features(state, start, features)
