from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitspec.config import ServerSettings
from splitspec.serving import CHANNEL_OPTIONS, SERVER_OPTIONS, Server


@pytest.mark.parametrize("name", sorted({name for name, _ in [*CHANNEL_OPTIONS, *SERVER_OPTIONS]}))
def test_grpc_knows_the_option(name: str) -> None:
    # A name that gRPC doesn't know is ignored without a word.
    spec = importlib.util.find_spec("grpc._cython.cygrpc")
    assert spec is not None
    assert spec.origin is not None
    assert name.encode() in Path(spec.origin).read_bytes()


async def test_a_call_that_its_client_has_ended_is_left_in_order() -> None:
    """Also when the server is told to stop before that: the loop goes on until the call is over."""
    steps: list[str] = []

    async def serve(requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        try:
            await context.write(b"begun")
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(asyncio.sleep(0.3))
            steps.append("left")

    def add(server: grpc.aio.Server) -> None:
        methods: dict[str, Any] = {"M": grpc.stream_stream_rpc_method_handler(serve)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", methods)])

    async with Server(ServerSettings(port=0), [], add) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            call: Any = channel.stream_stream("/test.Service/M")()
            assert await call.read() == b"begun"
            call.cancel()
            await asyncio.sleep(0.1)
        assert steps == []
    assert steps == ["left"]
