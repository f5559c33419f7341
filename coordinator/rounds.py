"""The rounds of one request: propose, verify, commit. Read this file first.

    draft worker ──proposal──▶ coordinator ──the same bytes──▶ target worker
                                   ▲                                │
                                   └────────────verdict─────────────┘

Without a proposal (K = 0, no draft worker, a late answer, nothing to propose) the round is plain: the
target draws the next token. The output's distribution is the target's in every case.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from coordinator.drafting import Drafting
from coordinator.links import DraftLink, TargetLink
from coordinator.request import Request
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


@dataclass
class Rounds:
    """One request's loop over its two links. `drafting` is None when nothing is to be drafted."""

    session: Session
    target: TargetLink
    drafting: Drafting | None
    stopper: Stopper
    stats: Stats
    request: Request
    settings: CoordinatorSettings

    def __post_init__(self) -> None:
        self._num_accepted = 0
        self._misses = 0
        self._pause = 0

    async def run(self) -> AsyncGenerator[Block, None]:
        """Yield each round's block until the output ends."""
        while True:
            with self.stats.round() as span:
                proposal = await self._propose()
                verdict = await self._verify(proposal)
                block = self._commit(verdict, span, ahead=proposal is not None and proposal.parent_round > 0)
            yield block
            if block.emission.finish is not None:
                return

    async def _propose(self) -> common_pb2.Proposal | None:
        """A proposal, or None for a plain round."""
        # A proposal of K tokens commits up to K + 1. K is fixed before anything is drawn.
        num_draft_tokens = min(self.request.num_draft_tokens, self.stopper.remaining - 1)
        link = self.drafting.link if self.drafting is not None else None
        continued = self.target.continued()
        if continued is not None:
            return await self._continue(link, continued, num_draft_tokens)
        # The first round is plain: it brings the first token soonest, and tells what a plain round takes.
        if self.drafting is None or num_draft_tokens < 1 or self.target.plain_s is None:
            return None
        self._pause = max(0, self._pause - 1)
        if link is not None and not self._pause and not self.target.outstanding:
            link.relay = self._relay
            mode, num_ahead = self._ahead(link)
            proposal = await link.propose(
                num_draft_tokens, self._num_accepted, self._patience_s, mode, num_ahead
            )
            if proposal is not None:
                self._misses = 0
                return proposal if proposal.num_draft_tokens else None
            self._misses += 1
            self._pause = min(2**self._misses, _LONGEST_PAUSE)
        self.stats.miss()
        return None

    async def _continue(
        self, link: DraftLink | None, proposal: common_pb2.Proposal, num_draft_tokens: int
    ) -> common_pb2.Proposal:
        """The target has the proposal already; let the draft worker know that it holds."""
        if link is not None:
            mode, num_ahead = self._ahead(link)
            await link.go_on(max(1, num_draft_tokens), self._num_accepted, mode, num_ahead)
        self.session.round = proposal.stamp.round
        return proposal

    async def _relay(self, proposal: common_pb2.Proposal) -> None:
        await self.target.relay(proposal, self._features_start)

    def _ahead(self, link: DraftLink) -> tuple[Mode, int]:
        """What the draft worker is to do while the target verifies, but nothing that the end cuts off."""
        rounds_left = self.stopper.remaining // (self.request.num_draft_tokens + 1) - 1
        if self.request.mode not in link.modes or rounds_left < 1:
            return Mode.SEQUENTIAL, 0
        num_ahead = self.settings.num_ahead
        return self.request.mode, min(
            num_ahead, rounds_left
        ) if self.request.mode is Mode.PIPELINED else num_ahead

    async def _verify(self, proposal: common_pb2.Proposal | None) -> common_pb2.Verdict:
        """The target's verdict on the proposal, or its next plain token."""
        start = self._features_start
        if proposal is not None:
            try:
                return await self.target.verify(proposal, start)
            except InvalidRequestError as error:  # the proposal's fault, hence the draft worker's
                assert self.drafting is not None
                self.drafting.drop(error)
                raise UnavailableError(f"the target worker refused a proposal: {error}") from error
        # A proposal needs a target that stands still: run ahead only as far as surely none is made.
        window = self.settings.decode_window
        if self.drafting is not None and self.drafting.link is not None:
            window = max(1, min(window, self._pause))
        if self._pause > self.settings.decode_window:
            start = None  # what is granted now ends before another proposal is asked for
        return await self.target.decode(min(window, self.stopper.remaining), start)

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
    def _features_start(self) -> int | None:
        """First token whose features the draft worker lacks; None when it wants none."""
        link = self.drafting.link if self.drafting is not None else None
        # A worker that came in mid-stream may want others than those that the target was opened for.
        if link is None or link.features != self.target.features:
            return None
        return link.features_start

    @property
    def _patience_s(self) -> float:
        """How long a proposal is waited for: what plain decoding would take for the same tokens."""
        assert self.target.plain_s is not None
        plain_s = self.settings.draft_patience * (self.request.num_draft_tokens + 1) * self.target.plain_s
        return min(plain_s, self.settings.draft_timeout_s)
