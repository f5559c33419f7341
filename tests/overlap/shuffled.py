"""A request's rounds with real links and real workers in one process, on a wire that delivers in any order.

Each of the four directions keeps its own order, as a stream does; which of them delivers next, and how far
the rest gets before it does, is drawn. The models run on their workers' threads.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from coordinator.control.controller import Controller
from coordinator.control.shared import Shared
from coordinator.drafting import Drafting
from coordinator.links import DraftLink, TargetLink
from coordinator.rounds import Rounds
from coordinator.session import Session
from coordinator.stats import Stats
from coordinator.stopping import Stopper
from coordinator.workers import DraftHost, TargetHost
from draft_worker.drawing import DraftCounterNoise
from draft_worker.servicer import DraftWorker
from protos.v1.target_pb2 import TargetSessionResponse
from splitspec.config import CoordinatorSettings
from splitspec.engine.scheduler import run_alone
from splitspec.serving import EOF
from splitspec.telemetry import Telemetry
from splitspec.tokens import TokenLog
from splitspec.types import Drawing, Mode, Output, Rule, Sampling, Stop
from splitspec.wire import Draft, seal_key
from target_worker.servicer import TargetWorker

K = 3
_SETTINGS = CoordinatorSettings(model="simulated", draft_patience=1e4, draft_timeout_s=20, num_ahead=4)


@dataclass
class Pipe:
    """One direction of a stream. delivered: what the receiver may read. after: verdicts that come first."""

    after: int = 0
    under_way: deque[Any] = field(default_factory=deque)
    delivered: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    async def write(self, message: Any) -> None:
        self.under_way.append(message)


@dataclass
class End:
    """What one side of a stream has of it: a gRPC call, or a servicer's context."""

    out: Pipe
    into: Pipe

    async def write(self, message: Any) -> None:
        await self.out.write(message)

    async def read(self) -> Any:
        return await self.into.delivered.get()

    def cancel(self) -> None:
        self.into.under_way.append(EOF)
        self.out.under_way.append(EOF)


class Wire:
    """The streams of one request. seed: of the order; None delivers all at once."""

    def __init__(self, seed: int | None) -> None:
        self._pipes: list[Pipe] = []
        self._random = None if seed is None else random.Random(seed)
        #: Messages of each type that were delivered.
        self.seen: list[Any] = []

    def connect(self, after: int = 0) -> tuple[End, End]:
        """Both ends of a stream. after: verdicts that are delivered before anything of it."""
        there, back = Pipe(after), Pipe()
        self._pipes += [there, back]
        return End(there, back), End(back, there)

    async def deliver(self) -> None:
        """Until it is cancelled."""
        while True:
            verdicts = sum(isinstance(m, TargetSessionResponse) and m.HasField("verdict") for m in self.seen)
            waiting = [pipe for pipe in self._pipes if pipe.under_way and pipe.after <= verdicts]
            if not waiting:
                await asyncio.sleep(0.0002)
                continue
            for pipe in waiting if self._random is None else [self._random.choice(waiting)]:
                message = pipe.under_way.popleft()
                self.seen.append(message)
                pipe.delivered.put_nowait(message)
            if self._random is not None:
                # Now and then the models get ahead of the messages.
                await asyncio.sleep(0.002 if self._random.random() < 0.2 else 0)
            await asyncio.sleep(0)


class Worlds:
    """Both workers, which serve one request after the other."""

    def __init__(self, target: TargetWorker, draft: DraftWorker) -> None:
        self._target = target
        self._draft = draft
        self._count = 0

    def key(self, drawing: Drawing, prefix_hash: int) -> bytes:
        """What the distributions of a proposal on such a text are sealed with."""
        return seal_key(drawing, self._target.model.info.vocabulary_hash, prefix_hash)

    def fresh(self, drafter: str, drawing: Drawing, text: list[int], round_number: int, k: int) -> Draft:
        """What a drafter proposes on a text, by the noise of a round."""
        found, noise = self._draft.drafters[drafter], DraftCounterNoise(drawing.seed, round_number)
        draft: Draft = run_alone(found.propose(found.open(), text, k, drawing, noise))
        return draft

    async def run(
        self,
        prompt: list[int],
        length: int,
        mode: Mode,
        rule: Rule,
        seed: int,
        order: int | None,
        drafter: str,
        control: Controller | None = None,
        draft_after: int = 0,
    ) -> tuple[list[int], Stats, Wire]:
        """A request's tokens, what it counted, and the wire with all that went over it.

        control: another one than that which pins `mode` and K. draft_after: verdicts that come before the
        draft worker hears of the session.
        """
        self._count += 1
        session = Session("", f"session {self._count}", 1, TokenLog(prompt))
        greedy = rule is Rule.GREEDY
        session.drawing = Drawing(
            Sampling(temperature=0.0 if greedy else 1.0, seed=seed), rule, Output(len(prompt))
        )
        telemetry, wire = Telemetry(), Wire(order)
        with telemetry.tracing.request(None) as span:
            stats = Stats(span, telemetry.metrics, {})
            async with self._streams(wire, session, stats, drafter, draft_after) as (target, link):
                drafting = None
                if mode is not Mode.PLAIN:
                    drafting = Drafting(_no_other, link, 100)
                control = control or Controller(
                    Shared(), "target", mode=mode, num_draft_tokens=K, branches=_SETTINGS.num_ahead
                )
                stopper = Stopper(
                    Stop(), _NoText(), eos_token_ids=frozenset(), max_tokens=length, room=length
                )
                await target.open("", 0, 0)
                rounds = Rounds(session, target, drafting, stopper, stats, control, _SETTINGS)
                async for _ in rounds.run():
                    pass
        return session.tokens[len(prompt) :], stats, wire

    @asynccontextmanager
    async def _streams(
        self, wire: Wire, session: Session, stats: Stats, drafter: str, draft_after: int
    ) -> AsyncIterator[tuple[TargetLink, DraftLink]]:
        ours, theirs = wire.connect()
        stub: Any = SimpleNamespace(TargetSession=lambda timeout: ours)
        target_host = TargetHost("target", stub, self._target.describe())
        draft_ours, draft_theirs = wire.connect(draft_after)
        draft_stub: Any = SimpleNamespace(DraftSession=lambda timeout: draft_ours)
        draft_host = DraftHost("draft", draft_stub, self._draft.describe())
        tasks = [
            asyncio.create_task(self._target.TargetSession(None, theirs)),  # type: ignore[arg-type]
            asyncio.create_task(self._draft.DraftSession(None, draft_theirs)),  # type: ignore[arg-type]
            asyncio.create_task(wire.deliver()),
        ]
        link = DraftLink(draft_host, drafter, session, stats, "", 0, 0, None)
        target = TargetLink(target_host, session, stats, 20, None, link.features)
        try:
            yield target, link
        finally:
            link.cancel()
            target.cancel()
            await asyncio.wait(tasks[:2], timeout=20)
            tasks[2].cancel()
        for task in tasks[:2]:
            task.result()


async def _no_other() -> None:
    return None


class _NoText:
    """Detokenizer of a vocabulary without text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""
