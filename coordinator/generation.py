"""The life of one request: own its session, open both workers, run the rounds, deliver, leave."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace

import structlog

from coordinator.delivery import Delivery, Send
from coordinator.drafting import Drafting
from coordinator.links import DraftLink, TargetLink
from coordinator.ownership import Owner, Ownership
from coordinator.request import Request
from coordinator.retry import Note, encode_finished
from coordinator.rounds import Block, Rounds
from coordinator.stats import Stats
from coordinator.stopping import Emission, Stopper
from coordinator.text import TextCodec
from coordinator.workers import WorkerPool
from protos.v1 import common_pb2, coordinator_pb2
from splitspec.config import CoordinatorSettings
from splitspec.errors import (
    InvalidRequestError,
    OutOfSyncError,
    OverloadedError,
    SplitspecError,
    UnavailableError,
)
from splitspec.registry import WorkerHandle
from splitspec.telemetry import names

log = structlog.get_logger()

#: Target workers that a request may lose one after another without a token in between.
_MOST_LOSSES = 3


@dataclass
class Generation:
    """One call of Generate. `send` hands an event to the client; deadline_s: what its deadline leaves."""

    request: Request
    settings: CoordinatorSettings
    owner: Owner
    workers: WorkerPool
    codec: TextCodec
    send: Send
    deadline_s: float | None
    stats: Stats

    async def run(self) -> None:
        """From the session's record to the last event; whatever ends it, both workers are left."""
        request, span = self.request, self.stats.span
        async with contextlib.AsyncExitStack() as links:
            with span.child(names.ADMIT):
                owned = await links.enter_async_context(
                    self.owner.own(
                        request.tenant, request.session_id, request.sampling, request.keep_record_s, span
                    )
                )
                note, done = await self._begin(owned)
                if note.last_message is None:
                    await owned.save_note()
            if note.last_message is None:
                await self._generate(owned, note, done, links)
            else:
                await self._repeat(owned, note, done, note.last_message)

    async def _begin(self, owned: Ownership) -> tuple[Note, list[int]]:
        """The request's note, and the tokens that an earlier attempt of it has committed.

        Afterwards the session ends with the prompt and those tokens.
        """
        request, session = self.request, owned.session
        note = Note.decode(owned.record.request)
        if note is None or not note.of_same_request(request.request_id, request.digest):
            assert request.sampling.seed is not None
            note = Note(request.request_id, request.digest, len(session.tokens), request.sampling.seed)
        session.sampling = replace(session.sampling, seed=note.seed)
        prompt = await asyncio.to_thread(request.prompt, self.codec, session.tokens[: note.start])
        note = replace(note, num_prompt=len(prompt))
        done = session.tokens[note.prompt_end :]
        if not done:  # of an earlier attempt not even the whole prompt may have come into the journal
            session.tokens.extend(prompt[len(session.tokens) - note.start :])
        if request.resume_offset > len(done):
            raise InvalidRequestError.of(
                "resume_offset", request.resume_offset, f"at most {len(done)}, the tokens that were committed"
            )
        owned.note = note.encode()
        return note, done

    async def _generate(
        self, owned: Ownership, note: Note, done: list[int], links: contextlib.AsyncExitStack
    ) -> None:
        """Go on behind `done`, and leave the session to the next request."""
        drafting = await self._open_drafting(owned, links)
        target, opened = await self._open_target(owned, links, owned.record.target)
        stopper = self._stopper(target.host.description.model, note)
        delivery = self._delivery(owned, note, links)
        self.stats.count_prompt(note.prompt_end, opened.cached_length)
        with self.stats.span.child(names.JOURNAL):
            await owned.journal.acknowledged(len(owned.session.tokens))
        await self._send_started(owned, note, opened.cached_length)
        last = await self._deliver_again(delivery, stopper, done) if done else None
        if last is None or last.finish is None:
            rounds = Rounds(
                owned.session,
                target,
                drafting,
                stopper,
                self.stats,
                self.request.num_draft_tokens,
                self.settings,
            )
            last = await self._run_rounds(rounds, owned, delivery, links)
            target = rounds.target
        if self._keep_kv_ms:
            with self.stats.span.child(names.CLOSE):
                await self._leave_workers(owned, target, drafting)
        assert last.finish is not None
        finished = coordinator_pb2.Finished(
            reason=last.finish.value,
            stop_string=last.stop_string,
            usage=coordinator_pb2.Usage(
                prompt_tokens=note.prompt_end,
                cached_tokens=opened.cached_length,
                completion_tokens=stopper.num_tokens,
            ),
            acceptance=self.stats.acceptance(),
            timings=self.stats.timings(),
            rule=owned.session.sampling.rule.value,
            drafter=drafting.drafter if drafting is not None else "",
        )
        self.stats.finish(finished)
        owned.note = replace(note, finished=encode_finished(finished)).encode()
        await self.send(coordinator_pb2.GenerateResponse(finished=finished))

    async def _repeat(
        self, owned: Ownership, note: Note, done: list[int], finished: coordinator_pb2.Finished
    ) -> None:
        """Say again what a request has said that ran to its end."""
        links = contextlib.AsyncExitStack()
        with self.stats.choosing("target"):
            model = (await self.workers.targets())[0].description.model
        await self._send_started(owned, note, finished.usage.cached_tokens)
        await self._deliver_again(self._delivery(owned, note, links), self._stopper(model, note), done)
        await self.send(coordinator_pb2.GenerateResponse(finished=finished))

    async def _open_drafting(self, owned: Ownership, links: contextlib.AsyncExitStack) -> Drafting | None:
        """The draft side, which opens beside the target's; None for plain decoding."""
        if not self.request.num_draft_tokens:
            return None

        async def connect(held: WorkerHandle | None = None) -> DraftLink | None:
            with self.stats.choosing("draft"):
                drafter = self.request.drafter or await self.workers.default_drafter()
                host = await self.workers.draft(drafter, held.worker_id if held else "") if drafter else None
            if host is None:
                log.warning("no draft worker", drafter=drafter, session=owned.session.session_id)
                return None
            same = held is not None and (held.worker_id, held.drafter) == (host.worker_id, drafter)
            handle = held.handle if held is not None and same else ""
            known = len(owned.record.token_ids)
            return DraftLink(
                host, drafter, owned.session, self.stats, handle, known, self._keep_kv_ms, self.deadline_s
            )

        drafting = Drafting(connect, await connect(owned.record.draft), self.settings.draft_retry_s)
        links.callback(drafting.cancel)
        return drafting

    async def _open_target(
        self,
        owned: Ownership,
        links: contextlib.AsyncExitStack,
        held: WorkerHandle | None = None,
        avoid: str = "",
    ) -> tuple[TargetLink, common_pb2.Opened]:
        """The session on the first target worker that can be reached and has room.

        The one that holds its KV comes first, the one to avoid last. Raises UnavailableError,
        OverloadedError.
        """
        session = owned.session
        with self.stats.choosing("target"):
            hosts = await self.workers.targets(held.worker_id if held else "")
        failure: SplitspecError | None = None
        for host in sorted(hosts, key=lambda host: host.worker_id == avoid):
            context = host.description.model.max_context
            if len(session.tokens) >= context:
                expected = f"at most {context - 1}, as the context is {context}"
                raise InvalidRequestError.of("prompt", f"{len(session.tokens)} tokens", expected)
            target = TargetLink(host, session, self.stats, self.settings.target_timeout_s, self.deadline_s)
            links.callback(target.cancel)
            try:
                handle = held.handle if held and held.worker_id == host.worker_id else ""
                opened = await target.open(handle, len(owned.record.token_ids), self._keep_kv_ms)
            except (UnavailableError, OverloadedError) as error:
                log.warning("target worker unavailable", worker=host.worker_id, error=str(error))
                failure = error
            else:
                if self._keep_kv_ms:
                    owned.target = WorkerHandle(host.worker_id, target.handle)
                return target, opened
        assert failure is not None, "targets() returns at least one"
        raise failure

    async def _run_rounds(
        self, rounds: Rounds, owned: Ownership, delivery: Delivery, links: contextlib.AsyncExitStack
    ) -> Emission:
        """Deliver block by block; returns the last one's emission.

        A target worker that is lost, or holds other tokens, is replaced: the next one takes the session
        from its committed tokens.
        """
        losses = 0
        while True:
            try:
                async with contextlib.aclosing(rounds.run()) as blocks:
                    async for block in blocks:
                        losses = 0
                        await delivery.put(block)
                await delivery.flush()
                return block.emission
            except (UnavailableError, OutOfSyncError) as error:
                await delivery.flush()
                losses += 1
                lost = rounds.target
                log.warning("target worker lost", worker=lost.worker_id, error=str(error), losses=losses)
                lost.cancel()
                if losses == _MOST_LOSSES:
                    raise
                rounds.target, _ = await self._open_target(owned, links, avoid=lost.worker_id)

    def _stopper(self, model: common_pb2.ModelInfo, note: Note) -> Stopper:
        return Stopper(
            self.request.stop,
            self.codec.detokenizer(),
            eos_token_ids=frozenset(model.eos_token_ids),
            max_tokens=self.request.stop.max_tokens or self.settings.max_tokens,
            room=model.max_context - note.prompt_end,
        )

    def _delivery(self, owned: Ownership, note: Note, links: contextlib.AsyncExitStack) -> Delivery:
        one_token_each = self.request.one_token_per_chunk
        delivery = Delivery(self.send, owned.journal, self.stats, note.prompt_end, one_token_each)
        links.callback(delivery.cancel)
        return delivery

    async def _deliver_again(self, delivery: Delivery, stopper: Stopper, done: list[int]) -> Emission:
        """Send what an earlier attempt has committed, from the client's offset on."""
        emission = stopper.push(done)
        origins = (common_pb2.TOKEN_ORIGIN_REPEATED,) * len(emission.tokens)
        await delivery.deliver(Block(0, emission, origins, self.stats.span), self.request.resume_offset)
        return emission

    async def _leave_workers(self, owned: Ownership, target: TargetLink, drafting: Drafting | None) -> None:
        """Close both streams with the KV kept."""
        try:
            await target.close()
        except SplitspecError as error:  # everything is committed: the next request feeds it again
            log.warning("target worker lost at the end", worker=target.worker_id, error=str(error))
        draft = drafting.link if drafting is not None else None
        if draft is not None:
            await draft.close()
            if not draft.gone:
                owned.draft = WorkerHandle(draft.worker_id, draft.handle, draft.drafter)

    async def _send_started(self, owned: Ownership, note: Note, cached_tokens: int) -> None:
        started = coordinator_pb2.Started(
            request_id=self.request.request_id,
            session_id=owned.session.session_id,
            seed=note.seed,
            prompt_tokens=note.prompt_end,
            cached_tokens=cached_tokens,
        )
        await self.send(coordinator_pb2.GenerateResponse(started=started))

    @property
    def _keep_kv_ms(self) -> int:
        """How long workers keep the session's KV: not at all without a session of the client's own."""
        return round(self.settings.session_keep_s * 1000) if self.request.keep_kv else 0
