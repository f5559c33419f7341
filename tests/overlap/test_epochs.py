"""Messages of another epoch, session or round: each side leaves out or refuses what isn't its owner's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.links import TargetLink
from coordinator.session import Session
from coordinator.stats import Stats
from coordinator.workers import TargetHost
from draft_worker.drafters.lookup import LookupDrafter
from draft_worker.servicer import DraftWorker
from protos.v1 import common_pb2, draft_pb2, target_pb2
from splitspec.engine.simulated import SimulatedConfig, SimulatedLM
from splitspec.errors import InvalidRequestError, OutOfSyncError, StaleError
from splitspec.telemetry import NO_SPAN, Telemetry
from splitspec.tokens import TokenLog
from splitspec.types import Drawing, Output, Rule, Sampling
from splitspec.wire import Draft
from target_worker.servicer import TargetWorker
from tests.overlap.shuffled import End, Wire

TEXT = [3, 1, 4, 1, 5]
EPOCH = 10
GREEDY = Drawing(Sampling(temperature=0.0, seed=1), Rule.GREEDY, Output(len(TEXT)))


def stamp(**changes: Any) -> common_pb2.Stamp:
    """That of the first round on TEXT, but for the changes."""
    log = TokenLog(TEXT)
    found = common_pb2.Stamp(
        session_id="s", epoch=EPOCH, round=1, base_length=len(log), prefix_hash=log.prefix_hash()
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def opening(drafter: str = "") -> common_pb2.Open:
    return common_pb2.Open(
        token_ids=TEXT,
        sampling=GREEDY.sampling.to_proto(),
        rule=GREEDY.rule.value,
        output=GREEDY.output.to_proto(),
        drafter=drafter,
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetWorker]:
    directory: Path = tmp_path_factory.mktemp("simulated") / "target"
    SimulatedConfig(vocabulary_size=32).save(directory)
    model = SimulatedLM(directory, "target", "float32")
    worker = TargetWorker("target", model, Telemetry(), max_sessions=4, max_positions=512)
    yield worker
    worker.scheduler.close()


@pytest.fixture(scope="module")
def draft() -> Iterator[DraftWorker]:
    drafters = {"lookup": LookupDrafter("lookup", 3, 1)}
    worker = DraftWorker("draft", drafters, Telemetry(), max_sessions=4, max_positions=512)
    yield worker
    worker.scheduler.close()


class Stream:
    """A stream to a worker in this process."""

    def __init__(self, ours: End, serving: asyncio.Task[None]) -> None:
        self._ours = ours
        self._serving = serving

    async def tell(self, request: Any) -> None:
        await self._ours.write(request)

    async def ask(self, request: Any) -> Any:
        """The answer. Raises what ends the stream instead."""
        await self.tell(request)
        answer = asyncio.create_task(self._ours.read())
        await asyncio.wait({answer, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            self._serving.result()
        return answer.result()


@asynccontextmanager
async def stream(serve: Callable[[End], Any]) -> AsyncIterator[Stream]:
    wire = Wire(None)
    ours, theirs = wire.connect()
    delivering, serving = asyncio.create_task(wire.deliver()), asyncio.create_task(serve(theirs))
    yield Stream(ours, serving)
    ours.cancel()
    await asyncio.wait({serving})
    delivering.cancel()


def verifying(
    own: common_pb2.Stamp,
    proposal: common_pb2.Stamp,
    draft: Draft = Draft.certain((7, 8)),  # noqa: B008
    parent_round: int = 0,
) -> target_pb2.TargetSessionRequest:
    sent = common_pb2.Proposal(
        stamp=proposal,
        num_draft_tokens=len(draft.token_ids),
        body=draft.encode(b""),
        parent_round=parent_round,
    )
    return target_pb2.TargetSessionRequest(stamp=own, verify=target_pb2.Verify(proposal=sent))


def decoding(own: common_pb2.Stamp) -> target_pb2.TargetSessionRequest:
    return target_pb2.TargetSessionRequest(stamp=own, decode=target_pb2.Decode(num_tokens=1))


def closing(own: common_pb2.Stamp) -> target_pb2.TargetSessionRequest:
    return target_pb2.TargetSessionRequest(stamp=own, close=common_pb2.Close())


OTHERS = [
    ({"epoch": EPOCH - 1}, StaleError),
    ({"epoch": EPOCH + 1}, StaleError),
    ({"session_id": "t"}, InvalidRequestError),
]
TO_TARGET: dict[str, Callable[[common_pb2.Stamp], target_pb2.TargetSessionRequest]] = {
    "verify": lambda other: verifying(other, stamp()),
    "proposal": lambda other: verifying(stamp(), other),
    "decode": decoding,
    "close": closing,
}


@pytest.mark.parametrize(("changes", "error"), OTHERS, ids=str)
@pytest.mark.parametrize("kind", TO_TARGET)
async def test_a_target_refuses_another_owner_s_message(
    target: TargetWorker, kind: str, changes: dict[str, Any], error: type[Exception]
) -> None:
    """A proposal by its own stamp, too: what relays it may be another than what asked for it."""
    async with stream(lambda end: target.TargetSession(None, end)) as session:  # type: ignore[arg-type]
        opened = await session.ask(target_pb2.TargetSessionRequest(stamp=stamp(round=0), open=opening()))
        assert opened.opened.length == len(TEXT)
        with pytest.raises(error):
            await session.ask(TO_TARGET[kind](stamp(**changes)))


@pytest.mark.parametrize(("changes", "error"), OTHERS, ids=str)
@pytest.mark.parametrize("kind", ["propose", "close"])
async def test_a_draft_worker_refuses_another_owner_s_message(
    draft: DraftWorker, kind: str, changes: dict[str, Any], error: type[Exception]
) -> None:
    messages: dict[str, Any] = {
        "propose": {"propose": draft_pb2.Propose(num_draft_tokens=2, start=len(TEXT))},
        "close": {"close": common_pb2.Close()},
    }
    async with stream(lambda end: draft.DraftSession(None, end)) as session:  # type: ignore[arg-type]
        await session.ask(draft_pb2.DraftSessionRequest(stamp=stamp(round=0), open=opening("lookup")))
        with pytest.raises(error):
            await session.ask(draft_pb2.DraftSessionRequest(stamp=stamp(**changes), **messages[kind]))


async def test_rounds_that_were_taken_before_the_open_are_stale(
    target: TargetWorker, draft: DraftWorker
) -> None:
    """They get no answer: the next one's is the next."""
    async with stream(lambda end: target.TargetSession(None, end)) as session:  # type: ignore[arg-type]
        await session.ask(target_pb2.TargetSessionRequest(stamp=stamp(round=5), open=opening()))
        await session.tell(decoding(stamp(round=5)))
        await session.tell(verifying(stamp(), stamp(round=4)))
        assert (await session.ask(decoding(stamp(round=6)))).verdict.stamp.round == 6
    async with stream(lambda end: draft.DraftSession(None, end)) as session:  # type: ignore[arg-type]
        await session.ask(draft_pb2.DraftSessionRequest(stamp=stamp(round=5), open=opening("lookup")))
        propose = draft_pb2.Propose(num_draft_tokens=2, start=len(TEXT))
        await session.tell(draft_pb2.DraftSessionRequest(stamp=stamp(round=5), propose=propose))
        answer = await session.ask(draft_pb2.DraftSessionRequest(stamp=stamp(round=6), propose=propose))
        assert answer.proposal.stamp.round == 6


async def test_a_child_must_begin_with_the_token_that_came(target: TargetWorker) -> None:
    """One on the text before that token, under a rule of equality; a tree's other branches never do."""
    async with stream(lambda end: target.TargetSession(None, end)) as session:  # type: ignore[arg-type]
        await session.ask(target_pb2.TargetSessionRequest(stamp=stamp(round=0), open=opening()))
        committed = [*TEXT, *(await session.ask(verifying(stamp(), stamp()))).verdict.token_ids]
        log = TokenLog(committed[:-1])
        child = stamp(round=2, base_length=len(log), prefix_hash=log.prefix_hash())
        last = committed[-1]
        for draft in (Draft.certain([(last + 1) % 32, 3]), Draft.certain([last, 3], [0, 0])):
            await session.tell(verifying(stamp(), child, draft, parent_round=1))
        await session.tell(verifying(stamp(), child, Draft.certain([last, 3]), parent_round=7))
        answer = await session.ask(verifying(stamp(), child, Draft.certain([last, 3, 4, 5]), parent_round=1))
        assert answer.verdict.num_draft_tokens == 3


async def test_a_target_says_a_verdict_again_to_the_same_message_alone(target: TargetWorker) -> None:
    """Another body or text under the same round is stale and gets no answer: the next round's is the next."""
    async with stream(lambda end: target.TargetSession(None, end)) as session:  # type: ignore[arg-type]
        await session.ask(target_pb2.TargetSessionRequest(stamp=stamp(round=0), open=opening()))
        asked = verifying(stamp(), stamp())
        first = (await session.ask(asked)).verdict
        again = (await session.ask(asked)).verdict
        assert again.repeated
        assert not first.repeated
        again.repeated = False
        assert again == first
        await session.tell(verifying(stamp(), stamp(prefix_hash=1)))
        await session.tell(verifying(stamp(), stamp(), Draft.certain([8, 7])))
        following = first.stamp
        following.round += 1
        assert (await session.ask(decoding(following))).verdict.stamp.round == 2


def verdict(token: int, **changes: Any) -> target_pb2.TargetSessionResponse:
    log = TokenLog([*TEXT, token])
    after = stamp(base_length=len(log), prefix_hash=log.prefix_hash(), revision=1, **changes)
    found = common_pb2.Verdict(stamp=after, token_ids=[token], next_origin=common_pb2.TOKEN_ORIGIN_PLAIN)
    return target_pb2.TargetSessionResponse(verdict=found)


@asynccontextmanager
async def link(target: TargetWorker) -> AsyncIterator[tuple[TargetLink, End]]:
    """A coordinator's link, and the worker's end of its stream."""
    wire = Wire(None)
    ours, theirs = wire.connect()
    stub: Any = SimpleNamespace(TargetSession=lambda timeout: ours)
    session = Session("", "s", EPOCH, TokenLog(TEXT), drawing=GREEDY)
    stats = Stats(NO_SPAN, Telemetry().metrics, {})
    delivering = asyncio.create_task(wire.deliver())
    yield TargetLink(TargetHost("target", stub, target.describe()), session, stats, 20, None), theirs
    delivering.cancel()


STALE: list[dict[str, Any]] = [{"epoch": EPOCH - 1}, {"epoch": EPOCH + 1}, {"session_id": "t"}]


@pytest.mark.parametrize("changes", STALE, ids=str)
async def test_a_coordinator_takes_no_verdict_of_another_owner(
    target: TargetWorker, changes: dict[str, Any]
) -> None:
    """The one of its own that follows counts."""
    async with link(target) as (session, worker):
        await worker.write(verdict(9, **changes))
        await worker.write(verdict(8))
        found = await session.decode(1, None)
        assert list(found.token_ids) == [8]


async def test_a_coordinator_takes_no_verdict_of_an_older_or_a_later_round(target: TargetWorker) -> None:
    async with link(target) as (session, worker):
        for number in (1, 1, 2, 1, 2, 3, 5):
            await worker.write(verdict(number, round=number))
        found = [(await session.decode(1, None)).stamp.round for _ in range(3)]
        assert found == [1, 2, 3]
        with pytest.raises(OutOfSyncError, match="a verdict on round 5, expected 4"):
            await session.decode(1, None)
