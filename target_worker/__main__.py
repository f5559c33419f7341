"""`python -m target_worker`: the target worker's process."""

from __future__ import annotations

from pathlib import Path

import structlog
import torch

from protos.v1 import target_pb2, target_pb2_grpc
from splitspec.config import TargetSettings
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.features import parse_feature_layers
from splitspec.engine.loading import count_layers
from splitspec.models import resolve_model
from splitspec.process import registered, run_process, serve_until_signal, telemetry, unique_id
from splitspec.registry import Registry, WorkerEntry
from splitspec.serving import Server
from splitspec.telemetry import Telemetry
from target_worker.servicer import TargetWorker

log = structlog.get_logger()
SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetWorkerService"].full_name


async def main(settings: TargetSettings) -> None:
    worker_id = unique_id("target")
    async with telemetry(settings, "target", worker_id) as started:
        await serve(settings, worker_id, started)


async def serve(settings: TargetSettings, worker_id: str, telemetry: Telemetry) -> None:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    registry = await Registry.connect(settings.redis_url)
    directory: Path = resolve_model(settings.model)
    model = CausalLM.load(
        directory,
        name=settings.model,
        dtype=settings.dtype,
        device=settings.device,
        kv_memory_bytes=settings.kv_memory_bytes,
        deterministic=settings.deterministic,
        feature_layers=parse_feature_layers(settings.feature_layers, count_layers(directory, settings.model)),
    )
    log.info(
        "model loaded",
        model=settings.model,
        dtype=settings.dtype,
        device=settings.device,
        deterministic=model.info.deterministic,
        feature_layers=list(model.info.feature_layers),
    )
    worker = TargetWorker(
        worker_id,
        model,
        telemetry,
        max_sessions=settings.max_sessions,
        max_positions=settings.max_positions,
    )

    def add(server: object) -> None:
        target_pb2_grpc.add_TargetWorkerServiceServicer_to_server(worker, server)  # type: ignore[arg-type]

    async with Server(settings, [SERVICE], add) as server:

        def entry() -> WorkerEntry:
            description = worker.describe().SerializeToString()
            return WorkerEntry("target", worker_id, server.address, description)

        async with registered(registry, entry, settings.directory_lease_s):
            await serve_until_signal(server, settings)
    worker.scheduler.close()
    await registry.close()


run_process(TargetSettings, main)
