"""`python -m target_worker`: the target worker's process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any

import structlog
import torch

from protos.v1 import target_pb2, target_pb2_grpc
from splitspec.config import TargetSettings
from splitspec.engine.backends import load_model
from splitspec.engine.paged import PagedLM
from splitspec.engine.parallel import Ranks, in_ranks, join_ranks
from splitspec.models import resolve_model
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
from target_worker.servicer import TargetWorker

log = structlog.get_logger()
SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetWorkerService"].full_name


async def main(settings: TargetSettings) -> None:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    with waiting_for("the other ranks") if in_ranks() else contextlib.nullcontext():
        ranks = join_ranks(settings.device)
    if ranks is not None and not ranks.is_first:
        follow(settings, ranks)
        return
    worker_id = unique_id("target")
    async with telemetry(settings, "target", worker_id) as started:
        await serve(settings, ranks, worker_id, started)


def follow(settings: TargetSettings, ranks: Ranks) -> None:
    """What all ranks but the first do: it alone serves, and is the one that others talk to."""
    model = load(settings, ranks)
    # A signal to stop reaches all ranks. The first one finishes what runs, and lets the others go then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ranks.follow(model)
    ranks.leave()


def load(settings: TargetSettings, ranks: Ranks | None) -> PagedLM:
    # Ranks of one machine share its cache of models, and only one of them needs to fill it.
    with contextlib.nullcontext() if ranks is None else ranks.first_one_first():
        directory = resolve_model(settings.model)
    return load_model(
        directory,
        name=settings.model,
        dtype=settings.dtype,
        device=settings.device,
        kv_memory_bytes=settings.kv_memory_bytes,
        deterministic=settings.deterministic,
        feature_layers=settings.feature_layers,
        attention=settings.attention,
        ranks=ranks,
    )


async def serve(settings: TargetSettings, ranks: Ranks | None, worker_id: str, telemetry: Telemetry) -> None:
    registry = await connect_registry(settings)
    with waiting_for(f"the model {settings.model} to load"):
        model = load(settings, ranks)
    log.info(
        "model loaded",
        model=settings.model,
        dtype=settings.dtype,
        device=settings.device,
        deterministic=model.info.deterministic,
        feature_layers=list(model.info.feature_layers),
        ranks=1 if ranks is None else ranks.size,
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
            if ranks is None:
                await serve_until_signal(server, settings)
            else:
                await first_to_end(serve_until_signal(server, settings), ranks.watch(worker.scheduler.post))
    worker.scheduler.close()
    if ranks is not None:
        ranks.end()
        ranks.leave()
    await registry.close()


async def first_to_end(*work: Coroutine[Any, Any, None]) -> None:
    """Return when one of them does, or raise what it raises; the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for task in done:
        task.result()


run_process(TargetSettings, main)
