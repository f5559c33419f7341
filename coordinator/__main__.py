"""`python -m coordinator`: the coordinator's process."""

from __future__ import annotations

from coordinator.servicer import Coordinator
from coordinator.text import TextCodec
from protos.v1 import coordinator_pb2, coordinator_pb2_grpc
from splitspec.config import CoordinatorSettings
from splitspec.models import resolve_model
from splitspec.process import run_process, serve_until_signal, telemetry, unique_id
from splitspec.registry import Registry
from splitspec.serving import Server

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name


async def main(settings: CoordinatorSettings) -> None:
    registry = await Registry.connect(settings.redis_url)
    codec = TextCodec.load(resolve_model(settings.model))
    name = unique_id("coordinator")
    async with telemetry(settings, "coordinator", name, settings.slow_round_s) as started:
        coordinator = Coordinator(settings, registry, codec, started)

        def add(server: object) -> None:
            coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(coordinator, server)  # type: ignore[arg-type]

        async with Server(settings, [SERVICE], add) as server:
            await serve_until_signal(server, settings)
    await registry.close()


run_process(CoordinatorSettings, main)
