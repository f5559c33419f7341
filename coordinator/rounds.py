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

from coordinator.links import DraftLink, TargetLink
from coordinator.session import Session
from coordinator.stats import Stats
from coordinator.stopping import Emission, Stopper
from protos.v1 import common_pb2
from splitspec.config import CoordinatorSettings

#: After n misses in a row the draft worker is left out of the next 2**n - 1 rounds, up to this many.
_LONGEST_PAUSE = 63


@dataclass(frozen=True)
class Block:
    """What one round adds to the output. origins: for each token of the emission, its value on the wire."""

    offset: int
    emission: Emission
    origins: tuple[common_pb2.TokenOrigin.ValueType, ...]


@dataclass
class Rounds:
    """One request's loop over its two links. `draft` is None when nothing is to be drafted."""

    session: Session
    target: TargetLink
    draft: DraftLink | None
    stopper: Stopper
    stats: Stats
    num_draft_tokens: int
    settings: CoordinatorSettings

    def __post_init__(self) -> None:
        self._num_accepted = 0
        self._misses = 0
        self._pause = 0

    async def run(self) -> AsyncGenerator[Block, None]:
        """Yield each round's block until the output ends."""
        while True:
            proposal = await self._propose()
            verdict = await self._verify(proposal)
            block = self._commit(verdict)
            yield block
            if block.emission.finish is not None:
                return

    async def _propose(self) -> common_pb2.Proposal | None:
        """A proposal, or None for a plain round."""
        # A proposal of K tokens commits up to K + 1. K is fixed before anything is drawn.
        num_draft_tokens = min(self.num_draft_tokens, self.stopper.remaining - 1)
        if not self._drafting or num_draft_tokens < 1 or self.target.outstanding:
            return None
        if self._pause:
            self._pause -= 1
            self.stats.missed_rounds += 1
            return None
        assert self.draft is not None
        proposal = await self.draft.propose(num_draft_tokens, self._num_accepted, self._patience_s)
        if proposal is None:
            self.stats.missed_rounds += 1
            self._misses += 1
            self._pause = min(2**self._misses - 1, _LONGEST_PAUSE)
            return None
        self._misses = 0
        return proposal if proposal.num_draft_tokens else None

    async def _verify(self, proposal: common_pb2.Proposal | None) -> common_pb2.Verdict:
        """The target's verdict on the proposal, or its next plain token."""
        if proposal is not None:
            return await self.target.verify(proposal)
        # With a draft worker at hand the next round may have a proposal: the target must stand still for it.
        window = 1 if self._drafting and self.num_draft_tokens else self.settings.decode_window
        return await self.target.decode(min(window, self.stopper.remaining))

    def _commit(self, verdict: common_pb2.Verdict) -> Block:
        """Cut the verdict's tokens and commit them."""
        offset = self.stopper.num_tokens
        self.stats.count(verdict)
        emission = self.stopper.push(verdict.token_ids)
        kept = [token.token_id for token in emission.tokens]
        self.session.commit(verdict, kept)
        self._num_accepted = verdict.num_accepted
        origins = [*[common_pb2.TOKEN_ORIGIN_ACCEPTED] * verdict.num_accepted, verdict.next_origin]
        return Block(offset, emission, tuple(origins[: len(kept)]))

    @property
    def _drafting(self) -> bool:
        return self.draft is not None and not self.draft.gone

    @property
    def _patience_s(self) -> float:
        """How long a proposal is waited for: what plain decoding would take for the same tokens."""
        if self.target.pass_s is None:
            return self.settings.draft_timeout_s
        plain_s = self.settings.draft_patience * (self.num_draft_tokens + 1) * self.target.pass_s
        return min(plain_s, self.settings.draft_timeout_s)
