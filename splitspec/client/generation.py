"""A running generation, on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_status import rpc_status

from protos.v1 import coordinator_pb2
from splitspec.client import left
from splitspec.client.connection import Connection
from splitspec.client.left import SessionKey
from splitspec.client.values import Chunk, Finished, Result, Started, Token, from_proto
from splitspec.errors import SplitspecError, UnavailableError


class AsyncGeneration:
    """A running generation: iterate over its chunks, once.

    Leaving the iteration early cancels the call at once; so do `aclose` and leaving `async with`. The next
    request of that session needs no pause.
    """

    def __init__(
        self,
        connection: Connection,
        request: coordinator_pb2.GenerateRequest,
        timeout: float,
        seen: Callable[[int], None],
    ) -> None:
        """seen: told how many tokens the session has by now."""
        self._connection = connection
        self._request = request
        self._timeout = timeout
        self._seen = seen
        self._deadline = 0.0
        self._call: Any = None
        self._events: AsyncIterator[coordinator_pb2.GenerateResponse] | None = None
        self._reading = asyncio.Lock()
        self._closed = False
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._tokens: list[Token] = []
        self._texts: list[str] = []

    @property
    def started(self) -> Started:
        """Known with the first chunk. Raises RuntimeError before."""
        if self._started is None:
            raise RuntimeError("`started` is known once the first chunk has come")
        return self._started

    @property
    def finished(self) -> Finished:
        """Known after the last chunk. Raises RuntimeError before, and when the generation was left early."""
        if self._finished is None:
            raise RuntimeError("`finished` is known once the last chunk has come")
        return self._finished

    @property
    def whole(self) -> bool:
        """Everything has been read."""
        return self._closed and self._finished is not None

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return _Chunks(self)

    async def read(self) -> Chunk | None:
        """The next chunk; None after the last one and when the generation was closed.

        Readers at once each get another chunk. Raises RuntimeError when the client was closed.
        """
        async with self._reading:
            try:
                return await self._next_chunk()
            except asyncio.CancelledError:
                # Either `aclose` was called meanwhile, which ends the iteration, or this task is cancelled.
                closed, task = self._closed, asyncio.current_task()
                self.cancel()
                if not closed or (task is not None and task.cancelling()):
                    raise
                self._require_open()
                return None

    async def result(self) -> Result:
        """Everything, after the rest has been read."""
        while await self.read() is not None:
            pass
        return self.collected()

    async def text(self) -> str:
        """The whole text, after the rest has been read."""
        return (await self.result()).text

    def collected(self) -> Result:
        """Everything, once it has been read. Raises RuntimeError before."""
        return Result(self.started, tuple(self._tokens), "".join(self._texts), self.finished)

    async def aclose(self) -> None:
        """Cancel what still runs."""
        self.cancel()

    def cancel(self) -> None:
        """As `aclose`, on the event loop."""
        if self._call is not None and not self._connection.forked and not self._call.done():
            self._call.cancel()
            left.leave(self._session)
        self._close()

    def cancel_soon(self) -> None:
        """As `cancel`, from any thread and without waiting for it."""
        if not self._closed:
            self._connection.soon(self.cancel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel_soon()  # gRPC's call would go on, even when its channel is closed

    @property
    def _session(self) -> SessionKey:
        request = self._request
        request_id = "" if request.session_id else request.request_id
        return self._connection.address, request.tenant, request.session_id, request_id

    async def _next_chunk(self) -> Chunk | None:
        while (event := await self._next_event()) is not None:
            kind = event.WhichOneof("event")
            if kind == "started":
                self._started = from_proto(Started, event.started)
                self._seen(self._started.prompt_tokens)
            elif kind == "finished":
                self._finished = from_proto(Finished, event.finished)
            elif kind == "chunk":
                chunk = from_proto(Chunk, event.chunk)
                self._tokens += chunk.tokens
                self._seen(self.started.prompt_tokens + chunk.offset + len(chunk.tokens))
                self._texts.append(chunk.text)
                return chunk
        self._require_open()
        return None

    def _require_open(self) -> None:
        if self._connection.closed and not self.whole:
            raise RuntimeError("the client was closed before this generation had ended")

    async def _next_event(self) -> coordinator_pb2.GenerateResponse | None:
        """The next event; None once the generation has ended or was closed."""
        while not self._closed:
            try:
                return await self._receive()
            except SplitspecError as failure:
                self._call = self._events = None
                if self._started or not left.is_being_freed(self._session, failure, self._deadline):
                    self._close()
                    raise
                await asyncio.sleep(failure.retry_after_s)
        return None

    async def _receive(self) -> coordinator_pb2.GenerateResponse | None:
        self._connection.require_usable()
        try:
            event = await anext(self._events or self._begin(), None)
        except grpc.aio.AioRpcError as error:
            if rpc_status.from_call(error) is None:  # no word of the coordinator's
                left.leave(self._session)
            raise self._connection.failure(error, self._timeout) from None
        if event is None:
            self._close()
            if self._finished is None:
                raise UnavailableError(
                    f"the coordinator at {self._connection.address} ended without its last message"
                )
        return event

    def _begin(self) -> AsyncIterator[coordinator_pb2.GenerateResponse]:
        now = time.monotonic()
        self._deadline = self._deadline or now + self._timeout
        self._call = self._connection.stub.Generate(self._request, timeout=self._deadline - now)
        self._events = aiter(self._call)
        return self._events

    def _close(self) -> None:
        self._closed = True
        self._call = self._events = None  # gRPC ends with the last of its objects


class _Chunks:
    """An iteration. Whoever drops it, by `break` for example, doesn't want the rest."""

    def __init__(self, generation: AsyncGeneration) -> None:
        self._generation = generation

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self._generation.read()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def __del__(self) -> None:
        self._generation.cancel_soon()
