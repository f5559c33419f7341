"""The client: calls of CoordinatorService on an event loop."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, Unpack
from weakref import WeakSet

from protos.v1 import coordinator_pb2
from splitspec.client import arguments
from splitspec.client.connection import Connection
from splitspec.client.generation import AsyncGeneration
from splitspec.client.request import GenerateOptions, Prompt, generate_request
from splitspec.client.values import Description, from_proto

_GENERATE_TIMEOUT_S = 600.0
_UNARY_TIMEOUT_S = 10.0
#: Sessions whose length is remembered: what the server holds is checked against it.
_MOST_SESSIONS = 10_000


class AsyncClient:
    """A client of one coordinator, as an async context manager, on one event loop. address: "host:port".

    Every call raises the errors of splitspec.errors: what the coordinator says, InvalidRequestError for what
    is wrong by itself, before anything is sent, or UnavailableError when the coordinator can't be reached or
    the deadline passes. RuntimeError is for a client that isn't open, or is used on another event loop, or
    in a process that was forked since it was opened. Pickled, it is a client of that address, not open.
    """

    def __init__(self, address: str) -> None:
        self._address = arguments.coordinator_address(address)
        self._open: Connection | None = None
        self._generations: WeakSet[AsyncGeneration] = WeakSet()
        #: Tokens that were seen of each session by tenant and id; the one heard of last comes last.
        self._seen: dict[tuple[str, str], int] = {}

    async def __aenter__(self) -> Self:
        if self._open is not None:
            raise RuntimeError("the client is open already")
        self._open = Connection(self._address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection, self._open = self._connection, None
        if connection.forked:
            return
        connection.closed = True
        # Closing a channel only ends the calls that a task is waiting for.
        for generation in list(self._generations):
            generation.cancel()
        await connection.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._address,)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """Generate after a prompt: text, chat messages (`Message`, or dicts of its fields), or token ids.

        The call begins when the first chunk is asked for. Raises InvalidRequestError.
        """
        request = generate_request(prompt, options)
        session = (request.tenant, request.session_id)
        if options.get("session_length") is None:
            request.session_length = self._seen.get(session, 0)
        timeout = options.get("timeout")
        timeout_s = _GENERATE_TIMEOUT_S if timeout is None else arguments.seconds("timeout", timeout)
        generation = AsyncGeneration(
            self._connection, request, timeout_s, lambda length: self._note_seen(session, length)
        )
        self._generations.add(generation)
        return generation

    async def close_session(
        self, session_id: str, *, tenant: str | None = None, timeout: float | None = None
    ) -> bool:
        """End a session and free its KV everywhere; False when there was none.

        timeout: seconds, 10 by default.
        """
        request = coordinator_pb2.CloseSessionRequest(
            session_id=arguments.text("session_id", session_id),
            tenant="" if tenant is None else arguments.text("tenant", tenant),
        )
        connection = self._connection
        response = await connection.unary(
            lambda left_s: connection.stub.CloseSession(request, timeout=left_s),
            _unary_timeout(timeout),
            (connection.address, request.tenant, request.session_id, ""),
        )
        self._seen.pop((request.tenant, request.session_id), None)
        return response.closed

    async def describe(self, *, timeout: float | None = None) -> Description:
        """Models, drafters, rules and limits. timeout: seconds, 10 by default."""
        request = coordinator_pb2.DescribeRequest()
        connection = self._connection
        response = await connection.unary(
            lambda left_s: connection.stub.Describe(request, timeout=left_s), _unary_timeout(timeout)
        )
        return from_proto(Description, response)

    def _note_seen(self, session: tuple[str, str], length: int) -> None:
        if session[1]:
            self._seen.pop(session, None)
            self._seen[session] = length
            if len(self._seen) > _MOST_SESSIONS:
                del self._seen[next(iter(self._seen))]

    @property
    def _connection(self) -> Connection:
        if self._open is None:
            raise RuntimeError("the client isn't open: expected its use within `with` or `async with`")
        return self._open


def _unary_timeout(timeout: float | None) -> float:
    return _UNARY_TIMEOUT_S if timeout is None else arguments.seconds("timeout", timeout)
