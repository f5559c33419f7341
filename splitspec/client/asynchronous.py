"""The client: calls of CoordinatorService on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from weakref import WeakSet

import grpc
from grpc_status import rpc_status

from protos.v1 import coordinator_pb2, coordinator_pb2_grpc
from splitspec.client.request import GenerateOptions, Prompt, generate_request
from splitspec.client.values import Chunk, Description, Finished, Result, Started, Token, from_proto
from splitspec.errors import SplitspecError, UnavailableError, from_rpc_error
from splitspec.serving import channel

_GENERATE_TIMEOUT_S = 600.0
#: Sessions whose length is remembered: what the server holds is checked against it.
_MOST_SESSIONS = 10_000
UNARY_TIMEOUT_S = 10.0

T = TypeVar("T")


class AsyncClient:
    """A client of one coordinator, as an async context manager. address: "host:port".

    Every call raises the errors of splitspec.errors: what the coordinator says, or UnavailableError when
    it can't be reached or the deadline passes.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._generations: WeakSet[AsyncGeneration] = WeakSet()
        #: Tokens that were seen of each session by tenant and id; the one heard of last comes last.
        self._seen: dict[tuple[str, str], int] = {}

    async def __aenter__(self) -> Self:
        self._channel = channel(self._address)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing a channel only ends the calls that a task is waiting for.
        for generation in list(self._generations):
            await generation.aclose()
        await self._channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """Generate after a prompt: text, chat messages (`Message`, or dicts of its fields), or token ids.

        The call begins when the first chunk is asked for. Raises InvalidRequestError.
        """
        request = generate_request(prompt, options)
        session = (request.tenant, request.session_id)
        if "session_length" not in options:
            request.session_length = self._seen.get(session, 0)
        timeout = options.get("timeout", _GENERATE_TIMEOUT_S)
        generation = AsyncGeneration(
            lambda: self._stub.Generate(request, timeout=timeout),
            self._address,
            timeout,
            lambda length: self._note_seen(session, length),
        )
        self._generations.add(generation)
        return generation

    async def close_session(
        self, session_id: str, *, tenant: str = "", timeout: float = UNARY_TIMEOUT_S
    ) -> bool:
        """End a session and free its KV everywhere; False when there was none."""
        request = coordinator_pb2.CloseSessionRequest(session_id=session_id, tenant=tenant)
        response = await self._unary(self._stub.CloseSession(request, timeout=timeout), timeout)
        self._seen.pop((tenant, session_id), None)
        return response.closed

    async def describe(self, *, timeout: float = UNARY_TIMEOUT_S) -> Description:
        """Models, drafters, rules and limits."""
        request = coordinator_pb2.DescribeRequest()
        return from_proto(
            Description, await self._unary(self._stub.Describe(request, timeout=timeout), timeout)
        )

    def _note_seen(self, session: tuple[str, str], length: int) -> None:
        if session[1]:
            self._seen.pop(session, None)
            self._seen[session] = length
            if len(self._seen) > _MOST_SESSIONS:
                del self._seen[next(iter(self._seen))]

    async def _unary(self, call: Awaitable[T], timeout: float) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise _known(error, self._address, timeout) from None


class AsyncGeneration:
    """A running generation: iterate over its chunks, once.

    Leaving the iteration early cancels the call at once; so do `aclose` and leaving `async with`.
    """

    def __init__(
        self, call: Callable[[], Any], address: str, timeout: float, seen: Callable[[int], None]
    ) -> None:
        """seen: told how many tokens the session has by now."""
        self._make_call = call
        self._address = address
        self._timeout = timeout
        self._seen = seen
        self._call: Any = None
        self._events: AsyncIterator[coordinator_pb2.GenerateResponse] | None = None
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

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            while (chunk := await self.read()) is not None:
                yield chunk
        finally:
            await self.aclose()

    async def read(self) -> Chunk | None:
        """The next chunk; None after the last one and when the generation was closed."""
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
        return None

    async def result(self) -> Result:
        """Everything, after the rest has been read."""
        while await self.read() is not None:
            pass
        return Result(self.started, tuple(self._tokens), "".join(self._texts), self.finished)

    async def text(self) -> str:
        """The whole text, after the rest has been read."""
        return (await self.result()).text

    async def aclose(self) -> None:
        """Cancel what still runs."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _next_event(self) -> coordinator_pb2.GenerateResponse | None:
        """The next event; None once the generation has ended or was closed."""
        if self._closed:
            return None
        if self._events is None:
            self._call = self._make_call()
            self._events = aiter(self._call)
        try:
            event = await anext(self._events, None)
        except grpc.aio.AioRpcError as error:
            self._closed = True
            raise _known(error, self._address, self._timeout) from None
        except asyncio.CancelledError:
            # Either `aclose` was called meanwhile, which ends the iteration, or this task is cancelled.
            if self._closed:
                return None
            await self.aclose()
            raise
        if event is None:
            self._closed = True
            if self._finished is None:
                raise UnavailableError(f"the coordinator at {self._address} ended without its last message")
        return event


def _known(error: grpc.aio.AioRpcError, address: str, timeout: float) -> SplitspecError:
    """The one of our errors that a failed call stands for."""
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnavailableError(
            f"the coordinator at {address} didn't finish within the deadline of {timeout:g} s"
        )
    if code is grpc.StatusCode.UNAVAILABLE and rpc_status.from_call(error) is None:
        return UnavailableError(f"the coordinator at {address} can't be reached: {details}")
    return from_rpc_error(error) or SplitspecError(
        f"the coordinator at {address} failed with {code.name}: {details}"
    )
