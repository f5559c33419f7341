"""`python -m draft_worker`: the draft worker's process."""

from __future__ import annotations

import structlog

from draft_worker.drafters import DrafterSpec, Loading, build_drafter
from draft_worker.servicer import DraftWorker
from protos.v1 import draft_pb2, draft_pb2_grpc
from splitspec.config import DraftSettings
from splitspec.errors import ConfigError
from splitspec.process import (
    connect_registry,
    registered,
    run_process,
    serve_until_signal,
    telemetry,
    unique_id,
    waiting_for,
)
from splitspec.registry import WorkerEntry
from splitspec.serving import Server
from splitspec.telemetry import Telemetry

log = structlog.get_logger()
SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftWorkerService"].full_name


async def main(settings: DraftSettings) -> None:
    worker_id = unique_id("draft")
    async with telemetry(settings, "draft", worker_id) as started:
        await serve(settings, worker_id, started)


async def serve(settings: DraftSettings, worker_id: str, telemetry: Telemetry) -> None:
    if settings.threads:
        import torch

        torch.set_num_threads(settings.threads)
    registry = await connect_registry(settings)
    loading = Loading(settings.dtype, settings.device, settings.kv_memory_bytes, settings.attention)
    drafters = []
    for text in settings.drafters:
        with waiting_for(f"the drafter {text} to load"):
            drafters.append(build_drafter(DrafterSpec.parse(text), loading))
    names = [drafter.info.name for drafter in drafters]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"--drafters (SPLITSPEC_DRAFTERS): names {', '.join(names)}, expected each once: add ,name=...",
            field="drafters",
        )
    log.info("drafters loaded", drafters=[drafter.info.name for drafter in drafters])
    worker = DraftWorker(
        worker_id,
        {drafter.info.name: drafter for drafter in drafters},
        telemetry,
        max_sessions=settings.max_sessions,
        max_positions=settings.max_positions,
    )

    def add(server: object) -> None:
        draft_pb2_grpc.add_DraftWorkerServiceServicer_to_server(worker, server)  # type: ignore[arg-type]

    async with Server(settings, [SERVICE], add) as server:

        def entry() -> WorkerEntry:
            description = worker.describe().SerializeToString()
            return WorkerEntry("draft", worker_id, server.address, description)

        async with registered(registry, entry, settings.directory_lease_s):
            await serve_until_signal(server, settings)
    worker.scheduler.close()
    await registry.close()


run_process(DraftSettings, main)
