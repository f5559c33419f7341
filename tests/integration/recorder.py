"""A drafter that keeps the target's features, and a draft worker in the test's own process to serve it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import torch

from draft_worker.drafters.base import Drafter
from draft_worker.drawing import DraftCounterNoise
from draft_worker.servicer import DraftWorker
from protos.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from splitspec.config import DraftSettings
from splitspec.engine.scheduler import Steps
from splitspec.process import registered, unique_id
from splitspec.registry import Registry, WorkerEntry
from splitspec.serving import Server
from splitspec.telemetry import Telemetry
from splitspec.tokens import common_prefix
from splitspec.types import Drawing
from splitspec.wire import Draft

_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftWorkerService"].full_name


@dataclass(eq=False)
class Recorded:
    """One session. taken: of each hand-over its start, its end, and the committed tokens then."""

    tokens: list[int] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)
    taken: list[tuple[int, int, int]] = field(default_factory=list)


class Recorder:
    """Proposes what it knows that the target will say, every third time with a wrong token in it."""

    def __init__(self, name: str, wanted: common_pb2.FeatureRequest, known: Sequence[int] = ()) -> None:
        self.info = draft_pb2.DrafterInfo(name=name, kind="recorder", features=wanted)
        self.pools = ()
        self.known = list(known)
        self.states: list[Recorded] = []
        self.num_proposals = 0

    def open(self, tenant: str = "") -> Recorded:
        self.states.append(Recorded())
        return self.states[-1]

    def feed(self, state: Recorded, token_ids: Sequence[int]) -> Steps[int]:
        yield from ()
        kept = common_prefix(state.tokens, token_ids)
        state.tokens = list(token_ids)
        del state.features[kept:]
        return kept

    def held_features(self, state: Recorded) -> int:
        return len(state.features)

    def take_features(self, state: Recorded, start: int, features: torch.Tensor) -> None:
        state.taken.append((start, start + len(features), len(state.tokens)))
        state.features[start:] = features

    def propose(
        self,
        state: Recorded,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        drawing: Drawing,
        noise: DraftCounterNoise,
    ) -> Steps[Draft]:
        yield from self.feed(state, token_ids)
        if len(state.features) < len(token_ids) - 1:
            return Draft.certain(())
        self.num_proposals += 1
        proposal = self.known[len(token_ids) : len(token_ids) + num_draft_tokens]
        if proposal and self.num_proposals % 3 == 0:
            proposal[-1] += 1
        return Draft.certain(proposal)

    def rest(self, state: Recorded) -> None:
        pass

    def free(self, state: Recorded) -> None:
        pass

    def held_tokens(self, state: Recorded) -> int:
        return len(state.tokens)

    def held_bytes(self, state: Recorded) -> int:
        return 0


@contextlib.asynccontextmanager
async def serving(redis_url: str, *drafters: Drafter) -> AsyncIterator[str]:
    """Address of a draft worker with these drafters while the block runs; then its streams break off."""
    settings = DraftSettings(drafters=("lookup",), redis_url=redis_url, port=0, shutdown_grace_s=0)
    worker = DraftWorker(
        unique_id("draft"),
        {drafter.info.name: drafter for drafter in drafters},
        Telemetry(),
        max_sessions=8,
        max_positions=256,
    )
    registry = await Registry.connect(redis_url)
    try:
        async with Server(
            settings,
            [_SERVICE],
            lambda server: draft_pb2_grpc.add_DraftWorkerServiceServicer_to_server(worker, server),
        ) as server:

            def entry() -> WorkerEntry:
                return WorkerEntry(
                    "draft", worker.worker_id, server.address, worker.describe().SerializeToString()
                )

            async with registered(registry, entry, settings.directory_lease_s):
                await server.set_ready()
                yield server.address
    finally:
        worker.scheduler.close()
        await registry.close()
