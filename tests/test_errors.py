"""Each error survives the way over gRPC, with its field and its delay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from splitspec.errors import (
    ConfigError,
    HandshakeError,
    InvalidRequestError,
    LostTokensError,
    NotFoundError,
    OutOfSyncError,
    OverloadedError,
    SessionBusyError,
    SplitspecError,
    StaleError,
    UnavailableError,
    from_rpc_error,
    status_code,
    to_status,
)

CODES = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    SessionBusyError: grpc.StatusCode.ABORTED,
    StaleError: grpc.StatusCode.ABORTED,
    OutOfSyncError: grpc.StatusCode.FAILED_PRECONDITION,
    LostTokensError: grpc.StatusCode.DATA_LOSS,
    HandshakeError: grpc.StatusCode.FAILED_PRECONDITION,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
}
Context = grpc.aio.ServicerContext[bytes, bytes]


@asynccontextmanager
async def server_that(answers: Callable[[Context], Awaitable[bytes]]) -> AsyncIterator[int]:
    """A real server on loopback, by its port."""

    async def handle(request: bytes, context: Context) -> bytes:
        return await answers(context)

    server = grpc.aio.server()
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Fail": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def failure_at(port: int, timeout_s: float = 10.0) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Service/Fail")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"", timeout=timeout_s)
    return caught.value


async def over_grpc(error: SplitspecError) -> grpc.aio.AioRpcError:
    async def answers(context: Context) -> bytes:
        await context.abort_with_status(to_status(error))
        return b""

    async with server_that(answers) as port:
        return await failure_at(port)


def test_every_error_has_a_code() -> None:
    assert set(SplitspecError.__subclasses__()) == set(CODES)
    assert {cls: status_code(cls("wrong")) for cls in CODES} == CODES


@pytest.mark.parametrize("cls", CODES)
async def test_survives_grpc(cls: type[SplitspecError]) -> None:
    sent = cls("größe is 3,\nexpected 4 % of 5", field="sampling.größe", retry_after_s=1.001)
    failure = await over_grpc(sent)
    received = from_rpc_error(failure)
    assert failure.code() is CODES[cls]
    assert type(received) is cls
    assert (received.message, received.field, received.retry_after_s) == (
        sent.message,
        sent.field,
        sent.retry_after_s,
    )
    assert str(received) == sent.message


async def test_survives_grpc_without_field_and_delay() -> None:
    received = from_rpc_error(await over_grpc(OverloadedError("full")))
    assert received is not None
    assert (received.message, received.field, received.retry_after_s) == ("full", "", 0.0)


async def test_details_that_any_client_understands() -> None:
    failure = await over_grpc(InvalidRequestError.of("top_p", 2, "at most 1"))
    status = rpc_status.from_call(failure)
    violation = error_details_pb2.BadRequest()
    assert [detail.Unpack(violation) for detail in status.details] == [False, True]
    assert [(v.field, v.description) for v in violation.field_violations] == [
        ("top_p", "top_p is 2, expected at most 1")
    ]
    status = rpc_status.from_call(await over_grpc(OverloadedError("full", retry_after_s=0.25)))
    retry = error_details_pb2.RetryInfo()
    assert [detail.Unpack(retry) for detail in status.details] == [False, True]
    assert retry.retry_delay.ToMilliseconds() == 250


async def test_an_error_of_another_domain_is_none() -> None:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="NotFoundError", domain="another service"))
    status = status_pb2.Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="theirs", details=[detail])

    async def answers(context: Context) -> bytes:
        await context.abort_with_status(rpc_status.to_status(status))
        return b""

    async with server_that(answers) as port:
        assert from_rpc_error(await failure_at(port)) is None


async def test_an_error_without_details_is_none() -> None:
    async def answers(context: Context) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "someone else's")
        return b""

    async with server_that(answers) as port:
        assert from_rpc_error(await failure_at(port)) is None


async def test_a_deadline_is_none() -> None:
    async def answers(context: Context) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with server_that(answers) as port:
        failure = await failure_at(port, timeout_s=0.1)
    assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert from_rpc_error(failure) is None


async def test_a_server_that_has_gone_is_unavailable() -> None:
    async with server_that(lambda context: asyncio.sleep(0, b"")) as port:
        pass
    received = from_rpc_error(await failure_at(port))
    assert type(received) is UnavailableError
    assert received.message


def test_a_long_value_is_shortened() -> None:
    error = InvalidRequestError.of("prompt", "x" * 1000, "less text")
    assert error.field == "prompt"
    assert error.message == f"prompt is '{'x' * 76}..., expected less text"
