"""A bidirectional stream with one worker, as both links have it."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import grpc

from coordinator.session import Session
from coordinator.stats import Stats, Wait
from protos.v1 import common_pb2
from splitspec.errors import SplitspecError, UnavailableError, from_rpc_error
from splitspec.serving import EOF
from splitspec.telemetry.names import SpanName

Q = TypeVar("Q")
A = TypeVar("A")


class Link(Generic[Q, A]):
    """A bidirectional stream with one worker. `call` is the open stream."""

    role = ""

    def __init__(self, worker_id: str, call: Any, session: Session, stats: Stats) -> None:
        self.worker_id = worker_id
        self.handle = ""
        self._call = call
        self._session = session
        self._stats = stats
        self._writing = asyncio.Lock()

    async def _write(self, request: Q) -> None:
        try:
            async with self._writing:
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

    def _open(
        self,
        handle: str,
        start: int,
        end: int,
        lease_ms: int,
        drafter: str = "",
        features: common_pb2.FeatureRequest | None = None,
    ) -> common_pb2.Open:
        """An Open that brings the session's tokens from `start` up to `end`."""
        drawing = self._session.drawing
        assert drawing is not None
        return common_pb2.Open(
            handle=handle,
            start=start,
            token_ids=self._session.tokens[start:end],
            sampling=drawing.sampling.to_proto(),
            rule=drawing.rule.value,
            output=drawing.output.to_proto(),
            tenant=self._session.tenant,
            lease_ms=lease_ms,
            drafter=drafter,
            features=features,
        )

    def cancel(self) -> None:
        """Leave at once: the worker sees it within a round."""
        self._call.cancel()
