"""The features that the link to the draft worker collects for the next Propose."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from coordinator.links import DraftLink, draft
from coordinator.session import Session
from coordinator.stats import Stats
from protos.v1 import common_pb2, draft_pb2
from splitspec.telemetry import Telemetry
from splitspec.tokens import TokenLog
from splitspec.types import Drawing, Mode, Output, Rule, Sampling

TOKENS = list(range(12))


class ScriptedWorker:
    """A draft worker's end of the stream, and its description. Answers what the test tells it to."""

    worker_id = "draft"

    def __init__(self) -> None:
        self.stub = SimpleNamespace(DraftSession=lambda timeout: self)
        self.asked: asyncio.Queue[draft_pb2.DraftSessionRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[draft_pb2.DraftSessionResponse] = asyncio.Queue()

    def drafter(self, name: str) -> draft_pb2.DrafterInfo:
        wanted = common_pb2.FeatureRequest(layers=[0], dtype="float16")
        return draft_pb2.DrafterInfo(name=name, features=wanted)

    def modes(self, name: str) -> frozenset[Mode]:
        return frozenset()

    async def write(self, message: draft_pb2.DraftSessionRequest) -> None:
        self.asked.put_nowait(message)

    async def read(self) -> draft_pb2.DraftSessionResponse:
        return await self.answers.get()

    def cancel(self) -> None: ...

    async def open(self, features_length: int) -> None:
        """Answer the Open that is due."""
        await self.asked.get()
        opened = common_pb2.Opened(handle="h", length=len(TOKENS), features_length=features_length)
        self.answers.put_nowait(draft_pb2.DraftSessionResponse(opened=opened))


def features(start: int, end: int) -> common_pb2.Features:
    """Of tokens start to end - 1: one layer, one element, whose two bytes are the token."""
    data = b"".join(token.to_bytes(2, "little") for token in range(start, end))
    return common_pb2.Features(start=start, shape=[end - start, 1, 1], dtype="float16", data=data)


def link_to(worker: ScriptedWorker, handle: str, held: int) -> DraftLink:
    session = Session("", "s", 1, TokenLog(TOKENS))
    session.drawing = Drawing(Sampling(seed=1), Rule.SHARED_NOISE, Output(len(TOKENS)))
    telemetry = Telemetry()
    with telemetry.tracing.request(None) as span:
        stats = Stats(span, telemetry.metrics, {})
    return DraftLink(worker, "d", session, stats, handle, held, 0, None)  # type: ignore[arg-type]


async def sent(link: DraftLink, worker: ScriptedWorker, features_length: int) -> common_pb2.Features:
    """The features of the first Propose, once the worker has opened with those of some tokens."""
    proposing = asyncio.create_task(link.propose(1, 0, 60, Mode.SEQUENTIAL, 0))
    await worker.open(features_length)
    message = await worker.asked.get()
    link.cancel()
    assert await proposing is None
    return message.propose.features


@pytest.mark.parametrize(
    ("handle", "held", "brought", "asked"),
    [
        ("", 0, [(0, 4)], 4),
        ("", 0, [(0, 4), (4, 5), (5, 7)], 7),
        ("", 0, [(0, 4), (2, 6)], 6),  # asked for before the first had come
        ("", 0, [(0, 4), (1, 3)], 4),
        ("", 0, [(0, 4), (5, 7)], 4),  # a gap
        ("held", 8, [(7, 9)], 9),
    ],
)
async def test_features_that_come_before_the_worker_has_opened(
    handle: str, held: int, brought: list[tuple[int, int]], asked: int
) -> None:
    worker = ScriptedWorker()
    link = link_to(worker, handle, held)
    assert link.features_start == brought[0][0]
    for start, end in brought:
        link.bring(features(start, end))
    assert link.features_start == asked
    assert await sent(link, worker, brought[0][0]) == features(brought[0][0], asked)


async def test_features_behind_those_that_the_worker_no_longer_holds_are_dropped() -> None:
    worker = ScriptedWorker()
    link = link_to(worker, "held", 8)
    link.bring(features(7, 9))
    assert not (await sent(link, worker, 3)).data
    assert link.features_start == 3


async def test_no_more_features_than_one_message_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "_MOST_FEATURE_BYTES", 10)
    worker = ScriptedWorker()
    link = link_to(worker, "", 0)
    link.bring(features(0, 4))
    link.bring(features(4, 9))
    assert link.features_start is None
    assert await sent(link, worker, 0) == features(0, 5)
    assert link.features_start == 5
