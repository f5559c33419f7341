"""The rounds of one request: propose, verify, commit. Read this file first.

    draft worker ──proposal──▶ coordinator ──the same bytes──▶ target worker
                                   ▲                                │
                                   └────────────verdict─────────────┘

Without a proposal (K = 0, no draft worker, a late answer, nothing to propose) the round is plain: the
target draws the next token. The output's distribution is the target's in every case.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from coordinator.control.controller import Choice, Controller
from coordinator.control.seen import Answer, RoundSeen
from coordinator.drafting import Drafting
from coordinator.links import DraftLink, TargetLink
from coordinator.session import Session
from coordinator.stats import Stats
from coordinator.stopping import Emission, Stopper
from protos.v1 import common_pb2
from splitspec.config import CoordinatorSettings
from splitspec.errors import InvalidRequestError, UnavailableError
from splitspec.telemetry import Span, names
from splitspec.types import Mode

#: After n misses in a row the draft worker is left out of the next 2**n - 1 rounds, up to this many.
_LONGEST_PAUSE = 64


@dataclass(frozen=True)
class Block:
    """What one round adds to the output. origins: for each token of the emission, its value on the wire.

    logprobs: of each token, or none at all. span: the round's, for what becomes of the block.
    """

    offset: int
    emission: Emission
    origins: tuple[common_pb2.TokenOrigin.ValueType, ...]
    logprobs: tuple[common_pb2.Logprobs, ...]
    span: Span


@dataclass(frozen=True)
class Proposed:
    """What came of asking for num_asked draft tokens; 0 when nothing was asked for.

    proposal: None for a plain round. answer: the draft worker's, None when none came in time. prepared: the
    worker had been told to prepare for verdicts. relayed: the target had the proposal before its turn.
    """

    num_asked: int = 0
    proposal: common_pb2.Proposal | None = None
    answer: Answer | None = None
    prepared: bool = False
    relayed: bool = False

    @property
    def ahead(self) -> bool:
        """The proposal was drafted before the verdict before it was known."""
        return self.proposal is not None and self.proposal.parent_round > 0


@dataclass
class Rounds:
    """One request's loop over its two links. `drafting` is None when nothing is to be drafted."""

    session: Session
    target: TargetLink
    drafting: Drafting | None
    stopper: Stopper
    stats: Stats
    control: Controller
    settings: CoordinatorSettings

    def __post_init__(self) -> None:
        self._num_accepted = 0
        self._misses = 0
        self._pause = 0
        self._drafted_by: DraftLink | None = None
        # Whether the last round had verdicts prepared for.
        self._prepared = False
        # When this one began. What the draft worker took to open the session is left out.
        self._began = 0.0

    async def run(self) -> AsyncGenerator[Block, None]:
        """Yield each round's block until the output ends."""
        while True:
            self._began = time.perf_counter()
            with self.stats.round() as span:
                choice = self._choose()
                span.set(choice.attributes())
                proposed = await self._propose(choice)
                verdict, answer = await self._verify(choice, proposed)
                block = self._commit(verdict, span, ahead=proposed.ahead)
                self._learn(proposed, verdict, answer)
            yield block
            if block.emission.finish is not None:
                return

    def _choose(self) -> Choice:
        """Mode and proposal length, fixed before anything is drawn."""
        link = self.drafting.link if self.drafting is not None else None
        if link is not self._drafted_by and link is not None:
            self.control.use_draft(link.worker_id, link.identity)
            self._drafted_by = link
            self._misses = self._pause = 0
        # A proposal of K tokens commits up to K + 1.
        return self.control.choose(0 if self.drafting is None else max(0, self._remaining - 1))

    async def _propose(self, choice: Choice) -> Proposed:
        """A proposal, or none for a plain round."""
        link = self.drafting.link if self.drafting is not None else None
        continued = self.target.continued()
        if continued is not None:
            return await self._continue(link, continued, choice)
        # The first round is plain: it brings the first token soonest, and tells what a plain round takes.
        if self.drafting is None or not choice.num_draft_tokens or self.target.plain_s is None:
            return Proposed()
        self._pause = max(0, self._pause - 1)
        if link is not None and not self._pause:
            if self.target.outstanding:  # a proposal needs a target that stands still
                return Proposed()
            return await self._ask(link, choice)
        self.stats.miss()
        return Proposed()

    async def _ask(self, link: DraftLink, choice: Choice) -> Proposed:
        """A proposal of the draft worker's, waited for within the patience.

        A worker that is lost, or still opens the session, isn't one that drafts too slowly.
        """
        link.relay = self._relay
        asked, k, prepared = time.perf_counter(), choice.num_draft_tokens, self._prepared
        proposal = await link.propose(k, self._num_accepted, self._patience_s(k), *self._ahead(link, choice))
        if proposal is None:
            self.stats.miss()
            if link.gone:
                return Proposed()
            self._misses += 1
            self._pause = min(2**self._misses, _LONGEST_PAUSE)
            return Proposed(k if link.is_open else 0)
        self._misses = 0
        waited_s = link.waited_s
        self._began += time.perf_counter() - asked - waited_s
        # One that had been drafted already says nothing about the worker and the way to it.
        wait_s = None if proposal.parent_round else waited_s
        answer = Answer.of(proposal.timings, wait_s)
        # One that was prepared is as long as was asked for then.
        num_asked = proposal.num_draft_tokens if proposal.parent_round else k
        return Proposed(num_asked, proposal if proposal.num_draft_tokens else None, answer, prepared)

    async def _continue(
        self, link: DraftLink | None, proposal: common_pb2.Proposal, choice: Choice
    ) -> Proposed:
        """The target has the proposal already; let the draft worker know that it holds."""
        prepared = self._prepared
        if link is not None:
            num_draft_tokens = max(1, choice.num_draft_tokens)
            await link.go_on(num_draft_tokens, self._num_accepted, *self._ahead(link, choice))
        self.session.round = proposal.stamp.round
        answer = Answer.of(proposal.timings)
        return Proposed(proposal.num_draft_tokens, proposal, answer, prepared, relayed=True)

    async def _relay(self, proposal: common_pb2.Proposal) -> None:
        await self.target.relay(proposal, self._features_start)

    def _ahead(self, link: DraftLink, choice: Choice) -> tuple[Mode, int]:
        """What the draft worker is to do while the target verifies, but nothing that the end cuts off."""
        rounds_left = self._remaining // (choice.num_draft_tokens + 1) - 1
        mode = choice.mode if choice.mode in link.modes and rounds_left > 0 else Mode.SEQUENTIAL
        self._prepared = mode in (Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH)
        return mode, min(choice.num_ahead, rounds_left) if mode is Mode.PIPELINED else choice.num_ahead

    async def _verify(self, choice: Choice, proposed: Proposed) -> tuple[common_pb2.Verdict, Answer]:
        """The target's verdict on the proposal, or its next plain token; with what it took."""
        features, started = self._features_start, time.perf_counter()
        if proposed.proposal is not None:
            try:
                verdict = await self.target.verify(proposed.proposal, features)
            except InvalidRequestError as error:  # the proposal's fault, hence the draft worker's
                assert self.drafting is not None
                self.drafting.drop(error)
                raise UnavailableError(f"the target worker refused a proposal: {error}") from error
            waited = not proposed.relayed
        else:
            waited = not self.target.outstanding
            if self._pause > self.settings.decode_window:
                features = None  # what is granted now ends before another proposal is asked for
            verdict = await self.target.decode(min(self._window(choice), self.stopper.remaining), features)
        wait_s = time.perf_counter() - started if waited else None
        return verdict, Answer.of(verdict.timings, wait_s, verdict.timings.positions or None)

    def _window(self, choice: Choice) -> int:
        """Plain tokens to keep granted: only as far ahead as surely no proposal is made."""
        window = self.settings.decode_window
        if self.drafting is None or self.drafting.link is None:
            return max(window, choice.num_ahead)
        if choice.mode is not Mode.PLAIN or choice.tried:
            return max(1, min(window, self._pause))
        return choice.num_ahead

    def _learn(self, proposed: Proposed, verdict: common_pb2.Verdict, answer: Answer) -> None:
        self.control.observe(
            RoundSeen(
                num_asked=proposed.num_asked,
                num_draft_tokens=verdict.num_draft_tokens,
                num_accepted=verdict.num_accepted,
                num_tokens=len(verdict.token_ids),
                duration_ms=(time.perf_counter() - self._began) * 1e3,
                target=answer,
                draft=proposed.answer,
                hit=proposed.ahead if proposed.proposal is not None and proposed.prepared else None,
            )
        )

    def _commit(self, verdict: common_pb2.Verdict, span: Span, *, ahead: bool) -> Block:
        """Cut the verdict's tokens and commit them. span: the round's. ahead: see Stats.count."""
        with span.child(names.COMMIT) as commit:
            self.session.check(verdict)
            offset = self.stopper.num_tokens
            emission = self.stopper.push(verdict.token_ids)
            kept = [token.token_id for token in emission.tokens]
            commit.set({names.NUM_TOKENS: len(kept)})
            self.stats.count(verdict, len(kept), ahead=ahead)
            self.session.commit(verdict, kept)
        if verdict.HasField("features") and self.drafting is not None and self.drafting.link is not None:
            self.drafting.link.bring(verdict.features)
        self._num_accepted = verdict.num_accepted
        origins = [*[common_pb2.TOKEN_ORIGIN_ACCEPTED] * verdict.num_accepted, verdict.next_origin]
        count = len(kept)
        return Block(offset, emission, tuple(origins[:count]), tuple(verdict.logprobs[:count]), span)

    @property
    def _remaining(self) -> int:
        """Tokens that may come yet, on this target worker: it may hold less than the one before."""
        return min(self.stopper.remaining, self.target.room)

    @property
    def _features_start(self) -> int | None:
        """First token whose features the draft worker lacks; None when it wants none."""
        link = self.drafting.link if self.drafting is not None else None
        # A worker that came in mid-stream may want others than those that the target was opened for.
        if link is None or link.features != self.target.features:
            return None
        return link.features_start

    def _patience_s(self, num_draft_tokens: int) -> float:
        """How long a proposal is waited for: what plain decoding would take for the same tokens."""
        assert self.target.plain_s is not None
        plain_s = self.settings.draft_patience * (num_draft_tokens + 1) * self.target.plain_s
        return min(plain_s, self.settings.draft_timeout_s)
