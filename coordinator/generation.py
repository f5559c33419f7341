"""The life of one request: own its session, open both workers, run the rounds, deliver, keep or free."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from coordinator.links import DraftLink, TargetLink
from coordinator.request import Request
from coordinator.rounds import Block, Rounds
from coordinator.session import Session
from coordinator.stats import Stats
from coordinator.stopping import Stopper
from coordinator.text import TextCodec
from coordinator.workers import WorkerPool
from protos.v1 import common_pb2, coordinator_pb2
from splitspec.config import CoordinatorSettings
from splitspec.errors import InvalidRequestError, SplitspecError, UnavailableError
from splitspec.registry import Registry, SessionRecord, WorkerHandle
from splitspec.tokens import TokenLog

log = structlog.get_logger()

Send = Callable[[coordinator_pb2.GenerateResponse], Awaitable[None]]


@dataclass
class Generation:
    """One call of Generate. `send` hands an event to the client."""

    request: Request
    settings: CoordinatorSettings
    registry: Registry
    workers: WorkerPool
    codec: TextCodec
    send: Send
    stats: Stats = field(default_factory=Stats)

    async def run(self) -> None:
        """From the session's record to the last event; whatever ends it, both workers are left."""
        async with self._owned() as (session, record), contextlib.AsyncExitStack() as links:
            session.tokens.extend(self.request.prompt)
            draft = await self._open_draft(session, record)
            if draft is not None:
                links.callback(draft.cancel)
            target, opened = await self._open_target(session, record)
            links.callback(target.cancel)
            stopper = self._stopper(target, len(session.tokens))
            await self._journal(session, len(record.token_ids), session.tokens[len(record.token_ids) :])
            await self._send_started(session, opened)
            usage = coordinator_pb2.Usage(
                prompt_tokens=len(session.tokens), cached_tokens=opened.cached_length
            )
            rounds = Rounds(
                session, target, draft, stopper, self.stats, self.request.num_draft_tokens, self.settings
            )
            last = await self._deliver(rounds, session)
            if self.request.keep:
                await self._keep(session, target, draft)
            usage.completion_tokens = stopper.num_tokens
            await self._send_finished(session, last, usage, draft.drafter if draft else "")

    @contextlib.asynccontextmanager
    async def _owned(self) -> AsyncIterator[tuple[Session, SessionRecord]]:
        """The session under a new epoch, its lease renewed until the end; then kept or deleted."""
        key = (self.request.tenant, self.request.session_id)
        record = await self.registry.open_session(
            *key, uuid.uuid4().hex, round(self.settings.session_lease_s * 1000)
        )
        session = Session(
            *key,
            epoch=record.epoch,
            sampling=self.request.sampling,
            tokens=TokenLog(record.token_ids),
            round=record.round_number,
            revision=record.revision,
        )
        renewing = asyncio.create_task(self._renew(session))
        try:
            yield session, record
        finally:
            renewing.cancel()
            with contextlib.suppress(SplitspecError):  # the lease ends what can't be ended now
                await self.registry.end(*key, session.epoch, self._keep_ms)

    async def _renew(self, session: Session) -> None:
        while True:
            await asyncio.sleep(self.settings.session_lease_s / 3)
            try:
                await self.registry.renew(session.tenant, session.session_id, session.epoch)
            except SplitspecError as error:
                log.warning("lease not renewed", session=session.session_id, error=str(error))

    async def _open_target(
        self, session: Session, record: SessionRecord
    ) -> tuple[TargetLink, common_pb2.Opened]:
        """The session on the first target worker that can be reached, the one that holds its KV first."""
        held = record.target
        failure: SplitspecError | None = None
        for host in await self.workers.targets(held.worker_id if held else ""):
            context = host.description.model.max_context
            if len(session.tokens) >= context:
                raise InvalidRequestError.of(
                    "prompt",
                    f"{len(session.tokens)} tokens",
                    f"at most {context - 1}, as the context is {context}",
                )
            target = TargetLink(host, session, self.stats, self.settings.target_timeout_s)
            try:
                handle = held.handle if held and held.worker_id == host.worker_id else ""
                return target, await target.open(handle, self._keep_ms)
            except UnavailableError as error:
                log.warning("target worker unavailable", worker=host.worker_id, error=str(error))
                failure = error
                target.cancel()
            except BaseException:
                target.cancel()
                raise
        assert failure is not None, "targets() returns at least one"
        raise failure

    async def _open_draft(self, session: Session, record: SessionRecord) -> DraftLink | None:
        """A link that opens beside the target's, or None for plain decoding."""
        if not self.request.num_draft_tokens:
            return None
        held = record.draft
        drafter = self.request.drafter or await self.workers.default_drafter()
        host = await self.workers.draft(drafter, held.worker_id if held else "") if drafter else None
        if host is None:
            log.warning("no draft worker", drafter=drafter, session=session.session_id)
            return None
        holds = held is not None and (held.worker_id, held.drafter) == (host.worker_id, drafter)
        handle = held.handle if held is not None and holds else ""
        return DraftLink(host, drafter, session, self.stats, handle, self._keep_ms)

    def _stopper(self, target: TargetLink, prompt_tokens: int) -> Stopper:
        model = target.host.description.model
        room = model.max_context - prompt_tokens
        return Stopper(
            self.request.stop,
            self.codec.detokenizer(),
            eos_token_ids=frozenset(model.eos_token_ids),
            max_tokens=self.request.stop.max_tokens or self.settings.max_tokens,
            room=room,
        )

    async def _deliver(self, rounds: Rounds, session: Session) -> Block:
        """Journal and send each block beside the next round; returns the last block.

        A chunk leaves only once the journal has it.
        """
        start = len(session.tokens)

        async def deliver(block: Block) -> None:
            ids = [token.token_id for token in block.emission.tokens]
            await self._journal(session, start + block.offset, ids)
            if self.stats.first_token is None:
                self.stats.first_token = time.perf_counter()
            for chunk in _chunks(block, self.request.one_token_per_chunk):
                await self.send(coordinator_pb2.GenerateResponse(chunk=chunk))

        delivery: asyncio.Task[None] | None = None
        try:
            async with contextlib.aclosing(rounds.run()) as blocks:
                async for block in blocks:
                    if delivery is not None:
                        await delivery
                    delivery = asyncio.create_task(deliver(block))
        except SplitspecError:
            # The rounds have failed; what was committed before still goes out.
            if delivery is not None:
                await delivery
            raise
        except BaseException:
            if delivery is not None:
                delivery.cancel()
            raise
        assert delivery is not None, "every generation has at least one block"
        await delivery
        return block

    async def _journal(self, session: Session, offset: int, token_ids: list[int]) -> None:
        await self.registry.append(session.tenant, session.session_id, session.epoch, offset, token_ids)

    async def _keep(self, session: Session, target: TargetLink, draft: DraftLink | None) -> None:
        """Leave the workers with their KV kept, and note who holds it."""
        await target.close()
        kept = None
        if draft is not None:
            await draft.close()
            if not draft.gone:
                kept = WorkerHandle(draft.worker_id, draft.handle, draft.drafter)
        await self.registry.save(
            session.tenant,
            session.session_id,
            session.epoch,
            target=WorkerHandle(target.worker_id, target.handle),
            draft=kept,
            revision=session.revision,
            round_number=session.round,
        )

    async def _send_started(self, session: Session, opened: common_pb2.Opened) -> None:
        started = coordinator_pb2.Started(
            request_id=self.request.request_id,
            session_id=session.session_id,
            seed=session.sampling.seed or 0,
            prompt_tokens=len(session.tokens),
            cached_tokens=opened.cached_length,
        )
        await self.send(coordinator_pb2.GenerateResponse(started=started))

    async def _send_finished(
        self, session: Session, last: Block, usage: coordinator_pb2.Usage, drafter: str
    ) -> None:
        assert last.emission.finish is not None
        finished = coordinator_pb2.Finished(
            reason=last.emission.finish.value,
            stop_string=last.emission.stop_string,
            usage=usage,
            acceptance=self.stats.acceptance(),
            timings=self.stats.timings(),
            rule=session.sampling.rule.value,
            drafter=drafter,
        )
        await self.send(coordinator_pb2.GenerateResponse(finished=finished))

    @property
    def _keep_ms(self) -> int:
        """How long session and KV outlive the request: not at all without a session id."""
        return round(self.settings.session_keep_s * 1000) if self.request.keep else 0


def _chunks(block: Block, one_token_per_chunk: bool) -> list[coordinator_pb2.Chunk]:
    """The block as one chunk, or as one for each token."""
    tokens = [
        coordinator_pb2.Token(id=token.token_id, origin=origin, text_end=token.text_end)
        for token, origin in zip(block.emission.tokens, block.origins, strict=True)
    ]
    text = block.emission.text
    if not one_token_per_chunk:
        return [coordinator_pb2.Chunk(offset=block.offset, tokens=tokens, text=text, durable=True)]
    text_start = tokens[-1].text_end - len(text)
    ends = [token.text_end - text_start for token in tokens]
    return [
        coordinator_pb2.Chunk(offset=block.offset + i, tokens=[token], text=text[begin:end], durable=True)
        for i, (token, begin, end) in enumerate(zip(tokens, [0, *ends[:-1]], ends, strict=True))
    ]
