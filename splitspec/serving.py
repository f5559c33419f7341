"""A grpc.aio server as all three processes run it: health, reflection, errors, graceful stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from splitspec.addresses import is_loopback, joined
from splitspec.config import ServerSettings
from splitspec.errors import ConfigError, SplitspecError, UnavailableError, to_status
from splitspec.types import MAX_MESSAGE_BYTES

log = structlog.get_logger()

#: What `context.read()` and `call.read()` return at the end of a stream.
EOF: Any = grpc.aio.EOF

#: Both sides ping an idle connection, so that a dead peer is noticed; servers must allow the pings.
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    # A worker that comes back at the same address is reached at once: by default a channel waits for up to
    # two minutes, together with all others to that address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # By default two pings go out, and then none before there is data again.
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *CHANNEL_OPTIONS,
    # By default a server sends a client away that pings more often than every five minutes. Load balancers
    # and mobile clients ping every 5 to 30 seconds; a ping costs microseconds, but a flood of them is abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    # Without this, a second server on the same port takes half of the connections in silence.
    ("grpc.so_reuseport", 0),
]


def channel(address: str) -> grpc.aio.Channel:
    """A channel to one of our servers: the only place that opens one."""
    return grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, proxy_option(address)])


def proxy_option(address: str) -> tuple[str, int]:
    """gRPC's option whether an address is reached through a proxy.

    By default gRPC goes through http_proxy and https_proxy, which are meant for the web, and which may
    accept the connection to an address that they can't reach, so that calls hang. The variable grpc_proxy
    is meant for gRPC, and holds here for all addresses but loopback.
    """
    wanted = bool(os.environ.get("grpc_proxy")) and not is_loopback(address)  # noqa: SIM112  # gRPC's
    return "grpc.enable_http_proxy", int(wanted)


#: What a call that is handed back gets to end in good order, and what is left of one that its client ended.
_HAND_BACK_S = 2.0
_RETRY_AFTER_S = 0.5


class Server:
    """One process's server. Use as an async context manager; `port` is known inside it.

    services: full names of the gRPC services that `add` registers; each gets its own health entry.
    """

    def __init__(
        self, settings: ServerSettings, services: Sequence[str], add: Callable[[grpc.aio.Server], None]
    ) -> None:
        self._settings = settings
        self._services = services
        self._leaving = asyncio.Event()
        self._guard = Guard(self._leaving)
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[self._guard])
        self._health = HealthServicer()
        add(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [
            *services,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        ]
        reflection.enable_server_reflection(names, self._server)
        self.port = 0

    @property
    def address(self) -> str:
        """host:port that other processes reach this one by."""
        return self._settings.advertise or joined(self._settings.host, self.port)

    async def __aenter__(self) -> Self:
        """Listen; alive at once, ready only after `set_ready`. Raises ConfigError when the port is taken."""
        wanted = joined(self._settings.host, self._settings.port)
        try:
            self.port = self._server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise ConfigError(
                f"--port (SPLITSPEC_PORT): can't listen on {wanted}, "
                "expected a free port on an address of this host"
            ) from error
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Not ready first; then calls that run get the grace time; what is left is handed back.

        A call that its client has ended isn't the library's any more, but may have a session to leave.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        grace_s = self._settings.shutdown_grace_s if error is None else 0
        hand_back = asyncio.get_running_loop().call_later(grace_s, self._leaving.set)
        await self._server.stop(grace_s + _HAND_BACK_S)
        hand_back.cancel()
        if self._guard.calls:
            await asyncio.wait(self._guard.calls, timeout=_HAND_BACK_S)

    async def set_ready(self) -> None:
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in self._services:
            await self._health.set(service, status)


async def wait_for_signal() -> None:
    """Return on SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


class Guard(grpc.aio.ServerInterceptor):
    """Around every call: errors become a status, and a server that leaves hands the call back.

    Our errors have their table, anything else is INTERNAL; an error ends its own call only. A call that
    is handed back ends with UnavailableError, and its client goes on elsewhere.
    """

    def __init__(self, leaving: asyncio.Event) -> None:
        self._leaving = leaving
        #: Those under way, whoever has ended them.
        self.calls: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        for kind in ("unary_unary", "unary_stream", "stream_stream"):
            inner = getattr(handler, kind, None)
            # Ours are all coroutines that read and write through the context; the library's may differ.
            if asyncio.iscoroutinefunction(inner):
                handler = handler._replace(**{kind: self._guarded(inner, handler_call_details.method)})
        return handler  # type: ignore[no-any-return]

    def _guarded(self, inner: Callable[..., Coroutine[Any, Any, Any]], method: str) -> Callable[..., Any]:
        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            call = asyncio.current_task()
            assert call is not None
            self.calls.add(call)
            call.add_done_callback(self.calls.discard)
            try:
                return await self._until_leaving(inner(request, context))
            except Exception as error:
                await _abort(error, method, context)

        return guarded

    async def _until_leaving(self, call: Coroutine[Any, Any, Any]) -> Any:
        work = asyncio.create_task(call)
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise UnavailableError(
                "this server is stopping: send the request again, and another one goes on with it",
                retry_after_s=_RETRY_AFTER_S,
            )
        finally:
            leaving.cancel()
            if work.cancel():
                await asyncio.wait({work})


async def _abort(error: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, SplitspecError):
        log.info("refused", method=method, error=str(error), kind=type(error).__name__)
        await context.abort_with_status(to_status(error))
    log.exception("failed", method=method)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error in {method}; the server's log has it")
