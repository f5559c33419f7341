"""CoordinatorService: the public service."""

from __future__ import annotations

import asyncio

import grpc

from coordinator.control.shared import Shared
from coordinator.generation import Generation
from coordinator.ownership import Owner
from coordinator.request import Request
from coordinator.stats import following
from coordinator.text import TextCodec
from coordinator.workers import WorkerPool
from protos.v1 import coordinator_pb2, coordinator_pb2_grpc
from splitspec import limits
from splitspec.config import CoordinatorSettings
from splitspec.errors import InvalidRequestError, OverloadedError, UnavailableError
from splitspec.limits import check_names
from splitspec.registry import Registry
from splitspec.telemetry import Telemetry, names
from splitspec.types import MAX_LOGPROBS, MAX_MESSAGE_BYTES, MAX_NUM_DRAFT_TOKENS, PROTOCOL_VERSION, Rule


class Coordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Holds nothing that matters: sessions live in Redis and on the workers."""

    def __init__(
        self, settings: CoordinatorSettings, registry: Registry, codec: TextCodec, telemetry: Telemetry
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._codec = codec
        self._running = 0
        self._control = Shared()
        self._telemetry = telemetry
        telemetry.metrics.watch(names.LIVE_SESSIONS, lambda: self._running)
        self._owner = Owner(registry, settings)
        self._workers = WorkerPool(registry, codec.vocabulary, settings.model, settings.drafter)

    async def Generate(  # type: ignore[override]  # reads and writes through the context
        self,
        request: coordinator_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[coordinator_pb2.GenerateRequest, coordinator_pb2.GenerateResponse],
    ) -> None:
        with following(
            self._telemetry, context.invocation_metadata(), request, self._settings.model
        ) as stats:
            if self._running >= self._settings.max_requests:
                raise OverloadedError(
                    f"all {self._running} requests that this coordinator runs at once are taken; try again",
                    retry_after_s=1.0,
                )
            self._running += 1

            async def send(event: coordinator_pb2.GenerateResponse) -> None:
                try:
                    await asyncio.wait_for(context.write(event), self._settings.client_timeout_s)
                except TimeoutError:
                    raise UnavailableError(
                        f"the client has read nothing for {self._settings.client_timeout_s:g} s"
                    ) from None

            try:
                with stats.span.child(names.READ):
                    # Beside the loop: a text of the largest message takes seconds to tokenize.
                    checked = await asyncio.to_thread(
                        Request.from_proto, request, self._settings, self._codec
                    )
                stats.describe(checked)
                generation = Generation(
                    checked,
                    self._settings,
                    self._owner,
                    self._workers,
                    self._codec,
                    send,
                    context.time_remaining(),
                    stats,
                    self._control,
                )
                await generation.run()
            finally:
                self._running -= 1

    async def CloseSession(
        self,
        request: coordinator_pb2.CloseSessionRequest,
        context: grpc.aio.ServicerContext[
            coordinator_pb2.CloseSessionRequest, coordinator_pb2.CloseSessionResponse
        ],
    ) -> coordinator_pb2.CloseSessionResponse:
        check_names(session_id=request.session_id, tenant=request.tenant)
        if not request.session_id:
            raise InvalidRequestError.of("session_id", "", "the id of a session")
        tenant, session_id = request.tenant, request.session_id
        keep_ms = round(self._settings.session_keep_s * 1000)
        record = await self._owner.when_left(
            tenant, session_id, lambda: self._registry.delete_session(tenant, session_id, keep_ms)
        )
        if record is not None:
            await self._workers.release(record)
        return coordinator_pb2.CloseSessionResponse(closed=record is not None)

    async def Describe(
        self,
        request: coordinator_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[coordinator_pb2.DescribeRequest, coordinator_pb2.DescribeResponse],
    ) -> coordinator_pb2.DescribeResponse:
        models = [host.description.model for host in await self._workers.targets()]
        return coordinator_pb2.DescribeResponse(
            protocol_version=PROTOCOL_VERSION,
            models=models,
            drafters=await self._workers.drafters(),
            rules=[rule.value for rule in Rule],
            limits=coordinator_pb2.RequestLimits(
                max_context=max(model.max_context for model in models),
                max_num_draft_tokens=MAX_NUM_DRAFT_TOKENS,
                max_message_bytes=MAX_MESSAGE_BYTES,
                max_tokens=self._settings.max_tokens,
                max_name_bytes=limits.MAX_NAME_BYTES,
                max_prompt_bytes=limits.MAX_PROMPT_BYTES,
                max_messages=limits.MAX_MESSAGES,
                max_stop_strings=limits.MAX_STOP_STRINGS,
                max_stop_string_bytes=limits.MAX_STOP_STRING_BYTES,
                max_stop_strings_bytes=limits.MAX_STOP_STRINGS_BYTES,
                max_stop_token_ids=limits.MAX_STOP_TOKEN_IDS,
                max_logit_bias=limits.MAX_LOGIT_BIAS,
                max_restricted_token_ids=limits.MAX_RESTRICTED_TOKEN_IDS,
                max_logprobs=MAX_LOGPROBS,
            ),
            default_drafter=await self._workers.default_drafter(),
            default_num_draft_tokens=self._settings.num_draft_tokens or 0,
        )
