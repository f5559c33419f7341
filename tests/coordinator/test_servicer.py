"""The coordinator's service in this process, on a real Redis and without workers."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from coordinator.servicer import Coordinator
from coordinator.text import TextCodec
from protos.v1 import coordinator_pb2, coordinator_pb2_grpc
from splitspec.config import CoordinatorSettings
from splitspec.registry import Registry
from splitspec.serving import Server
from splitspec.telemetry import Telemetry
from tests.coordinator.conftest import SaveModel

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
REQUEST = coordinator_pb2.GenerateRequest(text="Hello world")


class LongText(TextCodec):
    """Takes its time to tokenize: until it is told to go on."""

    begun: threading.Event
    go_on: threading.Event

    def encode(self, text: str) -> list[int]:
        self.begun.set()
        assert self.go_on.wait(10), "the loop stood still"
        return super().encode(text)


async def test_the_loop_goes_on_while_a_text_is_tokenized(registry: Registry, save_model: SaveModel) -> None:
    codec = LongText.load(save_model())
    assert isinstance(codec, LongText)
    codec.begun, codec.go_on = threading.Event(), threading.Event()
    settings = CoordinatorSettings(model="m", port=0, max_requests=1)
    coordinator = Coordinator(settings, registry, codec, Telemetry())

    def add(server: grpc.aio.Server) -> None:
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(coordinator, server)

    async with (
        Server(settings, [SERVICE], add) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        first = stub.Generate(REQUEST)
        assert await asyncio.to_thread(codec.begun.wait, 10)
        with pytest.raises(grpc.aio.AioRpcError, match="all 1 requests that this coordinator runs at once"):
            await stub.Generate(REQUEST).read()
        codec.go_on.set()
        with pytest.raises(grpc.aio.AioRpcError, match="no target worker is at hand"):
            await first.read()
