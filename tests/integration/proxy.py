"""A gRPC proxy that passes bytes on, and may drop, double or delay what a worker answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import grpc

#: What becomes of one answer: each copy with the seconds that it is held back.
Tamper = Callable[[bytes], list[tuple[float, bytes]]]


class Proxy(grpc.GenericRpcHandler):
    """Stands before one worker. `upstream` is its address, which may be set once calls come."""

    def __init__(self, tamper: Tamper) -> None:
        self._tamper = tamper
        self.upstream = ""

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)

    def service(self, details: Any) -> Any:
        name = details.method

        async def forward(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            async with grpc.aio.insecure_channel(self.upstream) as channel:
                call: Any = channel.stream_stream(name)(requests)  # type: ignore[arg-type]
                try:
                    async for answer in call:
                        copies = self._tamper(answer) if name.endswith("Session") else [(0.0, answer)]
                        for delay_s, copy in copies:
                            await asyncio.sleep(delay_s)
                            yield copy
                except grpc.aio.AioRpcError as error:
                    await context.abort(error.code(), error.details() or "", error.trailing_metadata())

        return grpc.stream_stream_rpc_method_handler(forward)
