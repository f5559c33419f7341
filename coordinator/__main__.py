"""`python -m coordinator`: the coordinator's process."""

from __future__ import annotations

import asyncio
import contextlib

from coordinator.servicer import Coordinator
from coordinator.text import TextCodec
from protos.v1 import coordinator_pb2, coordinator_pb2_grpc
from splitspec.config import CoordinatorSettings
from splitspec.errors import SplitspecError
from splitspec.models import resolve_model
from splitspec.process import (
    connect_registry,
    run_process,
    serve_until_signal,
    telemetry,
    unique_id,
    waiting_for,
)
from splitspec.registry import Registry
from splitspec.serving import Server

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name


async def main(settings: CoordinatorSettings) -> None:
    registry = await connect_registry(settings)
    with waiting_for(f"the tokenizer of {settings.model}"):
        codec = TextCodec.load(resolve_model(settings.model))
    name = unique_id("coordinator")
    async with telemetry(settings, "coordinator", name, settings.slow_round_s) as started:
        coordinator = Coordinator(settings, registry, codec, started)

        def add(server: object) -> None:
            coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(coordinator, server)  # type: ignore[arg-type]

        async with Server(settings, [SERVICE], add) as server:
            looking = asyncio.create_task(tell_without_target(registry))
            try:
                await serve_until_signal(server, settings)
            finally:
                looking.cancel()
    await registry.close()


async def tell_without_target(registry: Registry) -> None:
    """Log it until a first target worker has come: until then every request is refused."""
    with waiting_for("a target worker that enters the directory in Redis"):
        while True:
            with contextlib.suppress(SplitspecError):
                if await registry.workers("target"):
                    return
            await asyncio.sleep(1)


run_process(CoordinatorSettings, main)
