"""What the rounds tell the control, and when they ask: with scripted workers and a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.control import Choice, Controller, RoundSeen, Shared
from coordinator.drafting import Drafting
from coordinator.rounds import Rounds
from coordinator.session import Session
from coordinator.stats import Stats
from coordinator.stopping import Stopper
from protos.v1 import common_pb2
from splitspec.config import CoordinatorSettings
from splitspec.telemetry import Telemetry
from splitspec.tokens import TokenLog, extended_hash
from splitspec.types import Drawing, Mode, Output, Rule, Sampling, Stop

pytestmark = pytest.mark.asyncio(loop_scope="session")

K = 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only element is the time in seconds."""
    now = [0.0]
    monkeypatch.setattr("coordinator.rounds.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@dataclass
class Target:
    """Commits token 1 each time; drafts are wrong."""

    session: Session
    plain_s: float = 0.025
    outstanding: int = 0
    features: None = None
    max_context: int = 1000

    @property
    def room(self) -> int:
        return self.max_context - len(self.session.tokens)

    def continued(self) -> None:
        return None

    async def decode(self, window: int, features_start: int | None) -> common_pb2.Verdict:
        return self._verdict(common_pb2.TOKEN_ORIGIN_PLAIN)

    async def verify(self, proposal: common_pb2.Proposal, features_start: int | None) -> common_pb2.Verdict:
        return self._verdict(common_pb2.TOKEN_ORIGIN_CORRECTION, proposal.num_draft_tokens)

    def _verdict(self, origin: common_pb2.TokenOrigin.ValueType, k: int = 0) -> common_pb2.Verdict:
        tokens = self.session.tokens
        stamp = common_pb2.Stamp(
            base_length=len(tokens) + 1, prefix_hash=extended_hash(tokens.prefix_hash(), [1])
        )
        timings = common_pb2.ServerTimings(model_us=25_000, total_us=25_000)
        return common_pb2.Verdict(
            stamp=stamp,
            token_ids=[1],
            num_draft_tokens=k,
            next_origin=origin,
            timings=timings,
            rule=Rule.GREEDY.value,
        )


@dataclass
class Link:
    """A draft worker. answer: called for each Propose, with this; None is no proposal in time."""

    answer: Callable[[Link], common_pb2.Proposal | None]
    worker_id: str = "draft"
    drafter: str = "drafter"
    identity: str = "drafter"
    modes: frozenset[Mode] = frozenset({Mode.PLAIN, Mode.SEQUENTIAL})
    features: None = None
    features_start: None = None
    relay: Any = None
    gone: bool = False
    is_open: bool = True
    waited_s: float = 0.0
    asked: int = 0

    async def propose(self, *_: object) -> common_pb2.Proposal | None:
        self.asked += 1
        return self.answer(self)


class Recording(Controller):
    """Drafts K tokens in every round."""

    def __init__(self) -> None:
        super().__init__(Shared(), "target")
        self.seen: list[RoundSeen] = []
        self.limits: list[int] = []

    def choose(self, limit: int) -> Choice:
        self.limits.append(limit)
        return Choice(Mode.SEQUENTIAL, K, 0)

    def observe(self, seen: RoundSeen) -> None:
        self.seen.append(seen)


def late(link: Link) -> None:
    return None


def lost(link: Link) -> None:
    link.gone = True


def in_time(link: Link) -> common_pb2.Proposal:
    timings = common_pb2.ServerTimings(model_us=10_000, total_us=10_000)
    return common_pb2.Proposal(num_draft_tokens=K, timings=timings)


@dataclass
class Request:
    """A request's rounds. links: those that it has, one after the other as each is gone."""

    links: Sequence[Link]
    control: Recording = field(default_factory=Recording)
    max_context: int = 1000

    async def run(self, count: int, between: Callable[[], None] = lambda: None) -> list[RoundSeen]:
        """What the control was told of so many rounds; `between` is what the client does after each."""
        session = Session("", "session", 1, TokenLog([1, 2, 3]))
        session.drawing = Drawing(Sampling(temperature=0.0, seed=1), Rule.GREEDY, Output(3))
        left = iter(self.links)

        async def connect() -> Any:
            return next(left, None)

        drafting = Drafting(connect, await connect(), 0.0)
        stopper = Stopper(Stop(), NoText(), eos_token_ids=frozenset(), max_tokens=count, room=count)
        telemetry = Telemetry()
        with telemetry.tracing.request(None) as span:
            target: Any = Target(session, max_context=self.max_context)
            settings = CoordinatorSettings(model="scripted")
            stats = Stats(span, telemetry.metrics, {})
            async for _ in Rounds(session, target, drafting, stopper, stats, self.control, settings).run():
                between()
                if drafting.link is None and drafting._rejoining is not None:
                    await drafting._rejoining
        return self.control.seen


class NoText:
    """Detokenizer of a vocabulary without text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


async def test_a_round_s_time_has_no_wait_for_the_client(clock: list[float]) -> None:
    """Nor for a Redis that is away: else one slow reader would make drafting look slow to all."""

    def read() -> None:
        clock[0] += 0.3

    seen = await Request([Link(in_time)]).run(10, read)
    assert {each.duration_ms for each in seen} == {0.0}


async def test_a_round_s_time_and_the_way_to_the_worker_have_no_wait_for_its_opening(
    clock: list[float],
) -> None:
    """Which feeds the session's tokens: a worker that joins in mid-stream would look far away for good."""

    def opening(link: Link) -> common_pb2.Proposal:
        clock[0] += 0.5 + 0.015
        link.waited_s = 0.015
        return in_time(link)

    first, *_ = await Request([Link(opening)]).run(3)
    assert first.duration_ms == pytest.approx(15)
    assert first.draft is not None
    assert first.draft.round_trip_ms == pytest.approx(5)


async def test_a_worker_that_is_late_is_asked_ever_more_rarely() -> None:
    link = Link(late)
    seen = await Request([link]).run(100)
    assert link.asked == 6  # with 1, 3, 7, 15 and 31 rounds between
    assert [each.num_asked for each in seen if each.num_asked] == [K] * 6


async def test_another_worker_is_asked_at_once_whatever_the_one_before_missed() -> None:
    """The directory names a dead worker until its lease is over: each link to it fails at once."""

    def dies(link: Link) -> None:
        link.gone = link.asked == 5

    links = [Link(dies), *[Link(lost) for _ in range(5)], Link(in_time, "another")]
    seen = await Request(links).run(60)
    last = max(i for i, each in enumerate(seen) if not each.num_draft_tokens)
    assert all(each.num_draft_tokens == K for each in seen[last + 1 :])
    assert last < 40
    # Those that were lost drafted nothing that could be accepted or late.
    assert [each.num_asked for each in seen[: last + 1] if each.num_asked] == [K] * 4
    assert links[-1].asked == 60 - last - 1


async def test_a_worker_that_still_opens_the_session_is_not_a_slow_drafter() -> None:
    link = Link(late, is_open=False)
    seen = await Request([link]).run(20)
    assert link.asked > 1
    assert {each.num_asked for each in seen} == {0}


async def test_no_proposal_is_longer_than_what_the_target_worker_has_room_for(clock: list[float]) -> None:
    """It may have come in place of a larger one, by whose room the output's length was fixed."""
    request = Request([Link(in_time)], max_context=10)
    await request.run(6)
    assert request.control.limits == [5, 4, 3, 2, 1, 0]
    request = Request([Link(in_time)], max_context=8)
    await request.run(6)
    assert request.control.limits == [4, 3, 2, 1, 0, 0]
