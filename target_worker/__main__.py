"""`python -m target_worker`: the target worker's process."""

from __future__ import annotations

from pathlib import Path

import structlog
import torch

from protos.v1 import target_pb2, target_pb2_grpc
from splitspec.config import TargetSettings
from splitspec.engine.causal_lm import CausalLM
from splitspec.models import resolve_model
from splitspec.process import registered, run_process, serve_until_signal
from splitspec.registry import Registry, WorkerEntry
from splitspec.serving import Server
from target_worker.servicer import TargetWorker

log = structlog.get_logger()
SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetWorkerService"].full_name


async def main(settings: TargetSettings) -> None:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    registry = await Registry.connect(settings.redis_url)
    directory: Path = resolve_model(settings.model)
    model = CausalLM.load(directory, name=settings.model, dtype=settings.dtype, device=settings.device)
    log.info("model loaded", model=settings.model, dtype=settings.dtype, device=settings.device)
    worker = TargetWorker(model, max_sessions=settings.max_sessions, prompt_chunk=settings.prompt_chunk)

    def add(server: object) -> None:
        target_pb2_grpc.add_TargetWorkerServiceServicer_to_server(worker, server)  # type: ignore[arg-type]

    async with Server(settings, [SERVICE], add) as server:

        def entry() -> WorkerEntry:
            description = worker.describe().SerializeToString()
            return WorkerEntry("target", worker.worker_id, server.address, description)

        async with registered(registry, entry, settings.directory_lease_s):
            await serve_until_signal(server, settings)
    worker.thread.close()
    await registry.close()


run_process(TargetSettings, main)
