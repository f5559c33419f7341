"""What a session drafts before it is asked: proposals on texts that are only assumed (docs/overlap.md).

A branch is one proposal with the text that it builds on. The root is the one that the target verifies now.
Its children assume a verdict on it each: all accepted and nothing drawn yet (pipelined), or so many accepted
and a certain next token (prefetch). The next Propose brings the verdict: the child that it bears out becomes
the root, and the others are dropped.

A branch is drafted by the same code, on the same noise and in the same round as the fresh proposal that it
stands for, so it is that proposal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import structlog

from draft_worker.drafters.base import Drafter, PrefetchDrafter
from draft_worker.drawing import DraftCounterNoise
from draft_worker.fan_out import FanOut
from protos.v1 import common_pb2
from splitspec.engine.scheduler import Steps, Timer
from splitspec.overlap import begins_with
from splitspec.tokens import TokenLog, extended_hash
from splitspec.types import Drawing, Mode, Rule
from splitspec.wire import Draft, seal_key

log = structlog.get_logger()
R = TypeVar("R")


class Run(Protocol):
    """`WorkerSession.run`."""

    def __call__(
        self, steps: Steps[R], timer: Timer, stopped: Callable[[], bool]
    ) -> Coroutine[Any, Any, R]: ...


@dataclass(eq=False)
class Branch:
    """A proposal of the stamp's round, and the drafter's state that it was made on.

    text: the tokens that it builds on. outcome: what it takes for granted of its parent; None for a fresh
    one. rank: place of the outcome's next token among the likeliest ones, from 1; 0 without one.
    """

    stamp: common_pb2.Stamp
    text: Sequence[int]
    state: Any
    num_draft_tokens: int
    more_follows: bool
    parent_round: int = 0
    outcome: common_pb2.ParentOutcome | None = None
    rank: int = 0
    draft: Draft = field(default_factory=lambda: Draft.certain(()))
    proposal: common_pb2.Proposal | None = None
    children: list[Branch] = field(default_factory=list)
    drafting: asyncio.Task[None] | None = None
    dropped: bool = False
    sent: bool = False

    def child(self, growth: Sequence[int], outcome: common_pb2.ParentOutcome, state: Any) -> Branch:
        """A branch on this one's text and `growth`."""
        stamp = common_pb2.Stamp()
        stamp.CopyFrom(self.stamp)
        stamp.round += 1
        stamp.base_length += len(growth)
        stamp.prefix_hash = extended_hash(stamp.prefix_hash, growth)
        branch = Branch(
            stamp,
            [*self.text, *growth],
            state,
            self.num_draft_tokens,
            self.more_follows,
            self.stamp.round,
            outcome,
        )
        self.children.append(branch)
        return branch


class Ahead:
    """The branches of one session."""

    def __init__(self, drafter: Drafter, drawing: Drawing, run: Run) -> None:
        self._drafter = drafter
        self._drawing = drawing
        self._run = run
        self._fan_out = FanOut()
        self._root: Branch | None = None
        self._prepared: list[int] = []
        self._going_on: asyncio.Task[None] | None = None
        self._guessing: asyncio.Task[Any] | None = None

    def more_follows(self, mode: Mode) -> bool:
        """Whether the target is to hold its bonus back for the next branch."""
        return mode is Mode.PIPELINED and self._drawing.rule in (Rule.TOKEN, Rule.BLOCK)

    async def turn(self, round_number: int, tokens: TokenLog) -> Branch | None:
        """The child of the root that the committed tokens bear out, once it is drafted.

        None for a miss. All other branches are dropped, and no job of theirs runs any more.
        """
        self._stop()
        root = self._root
        if root is None:
            return None
        root.dropped = True
        found = None
        for child in root.children:
            if found is None and child.stamp.round == round_number and await self._holds(child, tokens):
                found = child
            else:
                _drop(child)
        await self._dropped(root)
        self._learn(root, tokens, found)
        # Only now: a session that ends before finds all that is to be dropped.
        self._root = found
        return found

    async def draft(self, branch: Branch, timer: Timer, steps: Steps[Draft] | None = None) -> None:
        """Draft a branch. steps: instead of the drafter's proposal on its text."""
        if steps is None:
            steps = self.steps(branch)
        branch.draft = await self._run(steps, timer, lambda: branch.dropped)
        info = self._drafter.info
        key = seal_key(self._drawing, info.model.vocabulary_hash, branch.stamp.prefix_hash)
        count = len(branch.draft.token_ids)
        branch.proposal = common_pb2.Proposal(
            stamp=branch.stamp,
            num_draft_tokens=count,
            parent_round=branch.parent_round,
            parent_outcome=branch.outcome,
            more_follows=branch.more_follows and count > 0,
            drafter=info.name,
            body=branch.draft.encode(key),
            timings=timer.to_proto(),
        )

    def go_on(self, root: Branch, mode: Mode, num_ahead: int, send: Callable[[Any], Awaitable[None]]) -> None:
        """Draft on while the target verifies the root. send: hands a proposal to the coordinator."""
        self._root = root
        if mode is Mode.PIPELINED:
            self._going_on = _task(self._pipeline(root, num_ahead, send))
        elif mode in (Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH):
            self._going_on = _task(
                self._prefetch(root, num_ahead, send if mode is Mode.PREFETCH_PUSH else None)
            )

    def drop(self) -> None:
        """The session ends: nothing more is drafted."""
        self._stop()
        root, self._root = self._root, None
        if root is not None:
            _drop(root)
            _task(self._dropped(root))

    def _stop(self) -> None:
        """Begin no other branches of the root."""
        if self._going_on is not None:
            self._going_on.cancel()
            self._going_on = None

    def steps(self, branch: Branch) -> Steps[Draft]:
        """The drafter's proposal on a branch's text."""
        noise = DraftCounterNoise(self._drawing.seed, branch.stamp.round)
        return self._drafter.propose(branch.state, branch.text, branch.num_draft_tokens, self._drawing, noise)

    async def _pipeline(self, root: Branch, num_ahead: int, send: Callable[[Any], Awaitable[None]]) -> None:
        """Each branch goes on from the one before, as if all of its tokens were accepted (2408.11850)."""
        last = root
        for _ in range(num_ahead):
            if not last.children:
                if not last.draft.token_ids or last.draft.parents:
                    return
                outcome = common_pb2.ParentOutcome(num_accepted=len(last.draft.token_ids))
                child = last.child(last.draft.token_ids, outcome, last.state)
                child.drafting = _task(self._draft_ahead(child, send))
            last = last.children[0]
            assert last.drafting is not None
            await asyncio.wait({last.drafting})
            if last.proposal is None:
                return

    async def _prefetch(
        self, root: Branch, num_ahead: int, send: Callable[[Any], Awaitable[None]] | None
    ) -> None:
        """Branches for the likeliest verdicts (2603.03251), drafted side by side."""
        if not root.draft.token_ids:
            return
        drafter = cast(PrefetchDrafter, self._drafter)
        counts = self._fan_out.counts(root.draft, num_ahead)
        noise = DraftCounterNoise(self._drawing.seed, root.stamp.round)
        steps = drafter.guess(root.state, root.text, root.draft, self._drawing, noise, counts)
        self._guessing = _task(self._run(steps, Timer(), lambda: root.dropped))
        await asyncio.wait({self._guessing})
        if self._guessing.cancelled() or self._guessing.exception() is not None:
            return
        guesses = self._guessing.result()
        self._prepared = [len(after) for after in guesses]
        for path, after in zip(root.draft.paths, guesses, strict=False):
            for rank, (token, state) in enumerate(after, start=1):
                outcome = common_pb2.ParentOutcome(num_accepted=len(path), next_token=token)
                child = root.child((*path, token), outcome, state)
                child.rank = rank
                child.drafting = _task(self._draft_ahead(child, send))

    async def _draft_ahead(self, branch: Branch, send: Callable[[Any], Awaitable[None]] | None) -> None:
        await self.draft(branch, Timer())
        if send is not None and branch.draft.token_ids and not branch.dropped:
            branch.sent = True
            await send(branch.proposal)

    async def _holds(self, branch: Branch, tokens: TokenLog) -> bool:
        """Whether the committed tokens bear a branch out; waits for it to be drafted if they may."""
        first = begins_with(branch.stamp, tokens, self._drawing.rule)
        if first is None or branch.drafting is None:
            return False
        await asyncio.wait({branch.drafting})
        if branch.proposal is None:
            return False
        return not first or (not branch.draft.parents and branch.draft.token_ids[:1] == first)

    async def _dropped(self, root: Branch) -> None:
        """Wait until no job of a dropped branch runs: the state that it works on may be the next one's.

        Then forget them at once: a job that was left refers to its branch, and so to blocks of a pool.
        """
        jobs = {self._guessing} if self._guessing is not None else set()
        waiting, dropped = [child for child in root.children if child.dropped], []
        while waiting:
            branch = waiting.pop()
            waiting.extend(branch.children)
            dropped.append(branch)
            if branch.drafting is not None:
                jobs.add(branch.drafting)
        if jobs:
            await asyncio.wait(jobs)
        for branch in dropped:
            branch.drafting = None
        root.children.clear()
        self._guessing = None

    def _learn(self, root: Branch, tokens: TokenLog, found: Branch | None) -> None:
        """Tell the fan-out what came of the root, if verdicts were prepared for."""
        prepared, self._prepared = self._prepared, []
        grown, paths = tuple(tokens[root.stamp.base_length :]), root.draft.paths
        if prepared and grown and grown[:-1] in paths:
            place = paths.index(grown[:-1])
            self._fan_out.saw(root.draft, place, prepared, found.rank if found is not None else 0)


def _drop(branch: Branch) -> None:
    branch.dropped = True
    for child in branch.children:
        _drop(child)


def _task(work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
    """In the background: what goes wrong there costs a branch, and nobody waits for it."""
    task = asyncio.create_task(work)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("drafting ahead failed", error=str(task.exception()))
