"""The whole service in one process: three servers on loopback, a real Redis, simulated models.

A test sees both workers' models and threads, and may hold the target up between two passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coordinator.servicer import Coordinator
from coordinator.text import TextCodec
from draft_worker.drafters.model import ModelDrafter
from draft_worker.servicer import DraftWorker
from protos.v1 import coordinator_pb2_grpc, draft_pb2_grpc, target_pb2_grpc
from splitspec.client import AsyncClient, AsyncGeneration, Result
from splitspec.config import CoordinatorSettings, ServerSettings
from splitspec.engine.feed import Feed
from splitspec.engine.scheduler import Scheduler
from splitspec.engine.simulated import SimulatedConfig, SimulatedLM
from splitspec.errors import SessionBusyError
from splitspec.registry import EmbeddedRedis, Registry, WorkerEntry
from splitspec.serving import Server
from splitspec.telemetry import Telemetry
from target_worker.servicer import TargetWorker

VOCABULARY = 32
#: Name of each drafter, and how often the target accepts what it drafts.
ACCEPTANCE = {"fair": 0.7, "sure": 1.0}
_LEASE_MS = 600_000


class Target(SimulatedLM):
    """A simulated target that can be held up after so many passes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "target", "float32")
        self._passes_left = -1
        self._go_on = threading.Event()

    def forward_batch(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        if self._passes_left == 0:
            self._go_on.wait()
        self._passes_left -= 1
        return super().forward_batch(feeds)

    @contextlib.contextmanager
    def held_after(self, num_passes: int) -> Iterator[None]:
        """Until the block ends it makes so many passes and no more."""
        self._go_on.clear()
        self._passes_left = num_passes
        try:
            yield
        finally:
            self._passes_left = -1
            self._go_on.set()


@dataclass(frozen=True)
class Service:
    """A client of the running service, its models, and the threads that they run on."""

    client: AsyncClient
    target: Target
    drafters: dict[str, ModelDrafter]
    target_thread: int
    draft_thread: int

    async def again(self, prompt: Sequence[int], **options: Any) -> Result:
        """The result of a request on a session whose last request may still be on its way out."""
        while True:
            try:
                return await self.client.generate(prompt, **options).result()
            except SessionBusyError:
                await asyncio.sleep(0.005)

    async def cut_off(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> list[int]:
        """The tokens of a request whose client leaves after `num_tokens` of them, in mid-stream."""
        generation: AsyncGeneration = self.client.generate(prompt, **options)
        received: list[int] = []
        # One pass for the prompt, and each further one brings a token at least.
        with self.target.held_after(1 + num_tokens):
            while len(received) < num_tokens:
                chunk = await generation.read()
                assert chunk is not None
                received += [token.id for token in chunk.tokens]
            await generation.aclose()
        return received


@contextlib.asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Service]:
    """Models are saved in the directory. The coordinator always waits for its draft worker."""

    def saved(name: str, acceptance: float) -> Path:
        SimulatedConfig(vocabulary_size=VOCABULARY, acceptance=acceptance).save(directory / name)
        return directory / name

    target_model = Target(saved("target", 1.0))
    drafters = {
        name: ModelDrafter(SimulatedLM(saved(name, a), name, "float32"), name)
        for name, a in ACCEPTANCE.items()
    }
    target = TargetWorker("target", target_model, Telemetry(), max_sessions=64, max_positions=512)
    draft = DraftWorker("draft", drafters, Telemetry(), max_sessions=64, max_positions=512)
    settings = CoordinatorSettings(
        model=str(directory / "target"),
        port=0,
        draft_patience=1e4,
        draft_timeout_s=20,
        overlap="sequential",
        num_draft_tokens=4,
    )
    async with contextlib.AsyncExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        registry = await Registry.connect(redis.url)
        stack.push_async_callback(registry.close)
        coordinator = Coordinator(settings, registry, TextCodec.load(directory / "target"), Telemetry())

        async def serve(add: Any, servicer: Any) -> str:
            server = Server(ServerSettings(shutdown_grace_s=0), [], lambda server: add(servicer, server))
            return (await stack.enter_async_context(server)).address

        address = await serve(target_pb2_grpc.add_TargetWorkerServiceServicer_to_server, target)
        entry = WorkerEntry("target", "target", address, target.describe().SerializeToString())
        await registry.register_worker(entry, _LEASE_MS)
        address = await serve(draft_pb2_grpc.add_DraftWorkerServiceServicer_to_server, draft)
        entry = WorkerEntry("draft", "draft", address, draft.describe().SerializeToString())
        await registry.register_worker(entry, _LEASE_MS)
        address = await serve(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, coordinator)
        client = await stack.enter_async_context(AsyncClient(address))
        threads = await _thread_of(target.scheduler), await _thread_of(draft.scheduler)
        yield Service(client, target_model, drafters, *threads)
    target.scheduler.close()
    draft.scheduler.close()


async def _thread_of(scheduler: Scheduler) -> int:
    loop = asyncio.get_running_loop()
    found: asyncio.Future[int] = loop.create_future()

    def tell() -> None:
        loop.call_soon_threadsafe(found.set_result, threading.get_ident())

    scheduler.post(tell)
    return await found
