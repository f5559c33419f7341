"""The standard health check, grpc.health.v1."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitspec.errors import NotFoundError, UnavailableError
from splitspec.serving import channel

_TIMEOUT_S = 5.0


async def health_status(address: str, service: str = "") -> str:
    """Status of a service at host:port, such as "SERVING"; the empty name asks whether the process lives.

    Raises UnavailableError when nothing answers there, NotFoundError for a service that it doesn't have.
    """
    async with channel(address) as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFoundError(f"{address} has no service {service!r}, expected its full name") from None
            raise UnavailableError(f"{address} can't be asked for its health: {error.details()}") from None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
