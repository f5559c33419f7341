"""The life of one request: own its session, open both workers, run the rounds, deliver, leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace

import structlog

from coordinator.control.controller import Controller
from coordinator.control.shared import Shared
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
from coordinator.workers import WorkerPool, roomiest
from protos.v1 import common_pb2, coordinator_pb2
from splitspec.config import CoordinatorSettings
from splitspec.errors import (
    HandshakeError,
    InvalidRequestError,
    OutOfSyncError,
    OverloadedError,
    SplitspecError,
    UnavailableError,
)
from splitspec.registry import WorkerHandle
from splitspec.telemetry import names
from splitspec.tokens import TokenLog
from splitspec.types import Drawing, Mode, Output

log = structlog.get_logger()

#: Target workers that a request may lose one after another without a token in between.
_MOST_LOSSES = 3
#: Longest wait for Redis to take the prompt: nothing is given to a client before.
_BEGIN_LIMIT_S = 3.0
#: What a target worker gets to take the final cut; a session that it has not taken is cut by its next Open.
_CLOSE_LIMIT_S = 5.0


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
    control: Shared

    async def run(self) -> None:
        """From the session's record to the last event; whatever ends it, both workers are left."""
        request, span = self.request, self.stats.span
        async with contextlib.AsyncExitStack() as links:
            with span.child(names.ADMIT):
                owned = await links.enter_async_context(
                    self.owner.own(
                        request.tenant, request.session_id, request.keep_record_s, span, request.claim
                    )
                )
                note = await self._begin(owned)
            await self._generate(owned, note, links)

    async def _begin(self, owned: Ownership) -> Note:
        """The request's note, new or that of an earlier attempt; the session ends with the prompt then, and
        with what that attempt has committed."""
        request, session = self.request, owned.session
        last = Note.decode(owned.record.request)
        if last is not None and last.prompt_end > len(session.tokens):
            last = None  # its tokens aren't there
        if last is None or not last.of_same_request(request.request_id, request.digest):
            note = await self._new_note(owned, last)
        else:
            note = last
        session.drawing = self._drawing(note)
        committed = len(session.tokens) - note.prompt_end
        if request.resume_offset > committed:
            raise InvalidRequestError.of(
                "resume_offset", request.resume_offset, f"at most {committed}, the tokens that were committed"
            )
        return note

    def _drawing(self, note: Note) -> Drawing:
        stop = self.request.stop
        ending = stop.stop_token_ids | (frozenset() if stop.ignore_eos else frozenset(note.eos_token_ids))
        drawing = Drawing(
            replace(self.request.sampling, seed=note.seed),
            self.request.rule,
            Output(note.prompt_end, stop.min_tokens, ending),
        )
        drawing.check_vocabulary(self.codec.vocabulary.size)
        return drawing

    async def _new_note(self, owned: Ownership, last: Note | None) -> Note:
        """Put the prompt into the session. last: the note of the session's last request."""
        request, before = self.request, list(owned.session.tokens)
        assert request.sampling.seed is not None
        # Beside the loop: a text of the largest message takes seconds to tokenize.
        prompt = await asyncio.to_thread(request.prompt, self.codec, before, last)
        host = max(await self.workers.targets(), key=lambda host: host.max_context)
        request.check_embedded(prompt, host.description.model.vocabulary_size)
        length = prompt.start + len(prompt.token_ids)
        room = host.max_context - length
        if room < 1:
            expected = f"at most {host.max_context - 1}, as {host.limit}"
            raise InvalidRequestError.of("prompt", f"{length} tokens", expected)
        await asyncio.to_thread(owned.put, prompt.start, prompt.token_ids)
        return Note(
            request.request_id,
            request.digest,
            request.sampling.seed,
            prompt.start,
            len(prompt.token_ids),
            room,
            tuple(host.description.model.eos_token_ids),
            messages=prompt.messages,
        )

    async def _generate(self, owned: Ownership, note: Note, links: contextlib.AsyncExitStack) -> None:
        """Say again what an earlier attempt has said, and go on behind it."""
        # Beside the loop: many stop strings take milliseconds, and so do many tokens.
        stopper, last = await asyncio.to_thread(self._stopper, owned.session.tokens, note)
        delivery = self._delivery(owned, note, links)
        finished = note.last_message
        if last is not None and last.finish is not None:
            await self._send_started(owned, note, finished.usage.cached_tokens if finished else 0)
            await self._deliver_again(delivery, last)
            finished = finished or self._finished(owned, note, last, stopper, cached_tokens=0, drafter="")
        else:
            finished = await self._go_on(owned, note, stopper, last, delivery, links)
        self.stats.finish(finished)
        # The note is stored once the journal has everything.
        finished.durable = True
        owned.note = replace(note, finished=encode_finished(finished)).encode()
        finished.durable = owned.journal.complete
        await self.send(coordinator_pb2.GenerateResponse(finished=finished))

    def _stopper(self, tokens: TokenLog, note: Note) -> tuple[Stopper, Emission | None]:
        """What finds the output's end, and what of it an earlier attempt has found."""
        stopper = Stopper(
            self.request.stop,
            self.codec.detokenizer(tokens[: note.prompt_end]),
            eos_token_ids=frozenset(note.eos_token_ids),
            max_tokens=self._max_tokens,
            room=note.room,
            special_stops=self.codec.special_stops(self.request.stop.stop_strings),
        )
        done = tokens[note.prompt_end :]
        return stopper, stopper.push(done) if done else None

    async def _go_on(
        self,
        owned: Ownership,
        note: Note,
        stopper: Stopper,
        last: Emission | None,
        delivery: Delivery,
        links: contextlib.AsyncExitStack,
    ) -> coordinator_pb2.Finished:
        """Open both workers and run the rounds, behind what an earlier attempt has emitted last."""
        drafting = await self._open_drafting(owned, links)
        features = await self._wanted_features(drafting)
        if drafting is not None:
            drafting.features = features
        target, opened = await self._open_target(owned, links, features, held=owned.record.target)
        self.stats.count_prompt(note.prompt_end, opened.cached_length)
        owned.begin(note.start if last is None else len(owned.session.tokens), note.encode())
        with self.stats.span.child(names.JOURNAL):
            await owned.journal.prompted(_BEGIN_LIMIT_S)
        await self._send_started(owned, note, opened.cached_length)
        if last is not None:
            await self._deliver_again(delivery, last)
        with contextlib.closing(self._controller(target, drafting)) as control:
            rounds = Rounds(owned.session, target, drafting, stopper, self.stats, control, self.settings)
            last = await self._run_rounds(rounds, owned, delivery, links)
        if self._keep_kv_ms:
            with self.stats.span.child(names.CLOSE):
                await self._leave_workers(rounds.target, drafting)
        drafter = drafting.drafter if drafting is not None else ""
        return self._finished(owned, note, last, stopper, opened.cached_length, drafter)

    def _controller(self, target: TargetLink, drafting: Drafting | None) -> Controller:
        link = drafting.link if drafting is not None else None
        return Controller(
            self.control,
            target.worker_id,
            link.modes if link is not None else tuple(Mode),
            mode=self.request.mode if drafting is not None else None,
            num_draft_tokens=self.request.num_draft_tokens,
            branches=self.settings.num_ahead,
        )

    def _finished(
        self,
        owned: Ownership,
        note: Note,
        last: Emission,
        stopper: Stopper,
        cached_tokens: int,
        drafter: str,
    ) -> coordinator_pb2.Finished:
        assert last.finish is not None
        rule, requested = self.stats.rule or self.request.rule, self.request.requested_rule
        return coordinator_pb2.Finished(
            reason=last.finish.value,
            stop_string=last.stop_string,
            usage=coordinator_pb2.Usage(
                prompt_tokens=note.prompt_end,
                cached_tokens=cached_tokens,
                completion_tokens=stopper.num_tokens,
            ),
            acceptance=self.stats.acceptance(),
            timings=self.stats.timings(),
            rule=rule.value,
            requested_rule=requested.value if requested else common_pb2.VERIFICATION_RULE_UNSPECIFIED,
            rule_reason=self.request.reason(rule),
            drafter=drafter,
        )

    async def _open_drafting(self, owned: Ownership, links: contextlib.AsyncExitStack) -> Drafting | None:
        """The draft side, which opens beside the target's; None for plain decoding."""
        if self.request.num_draft_tokens == 0:
            return None

        async def connect(held: WorkerHandle | None = None) -> DraftLink | None:
            with self.stats.choosing("draft"):
                drafter = self.request.drafter or await self.workers.default_drafter()
                host = None
                if drafter:
                    named = bool(self.request.drafter)
                    host = await self.workers.draft(drafter, held.worker_id if held else "", named=named)
            if host is None:
                log.warning("no draft worker", drafter=drafter, session=owned.session.session_id)
                return None
            host.check_mode(drafter, self.request.named_mode)
            same = held is not None and (held.worker_id, held.drafter) == (host.worker_id, drafter)
            handle = held.handle if held is not None and same else ""
            known = owned.kept
            return DraftLink(
                host, drafter, owned.session, self.stats, handle, known, self._keep_kv_ms, self._left_s
            )

        drafting = Drafting(connect, await connect(owned.record.draft), self.settings.draft_retry_s)
        links.callback(drafting.cancel)

        def keep_handle() -> None:
            owned.draft = drafting.held or owned.draft

        if self._keep_kv_ms:  # also when the client leaves: the next request, or the session's end, needs it
            links.callback(keep_handle)
        return drafting

    async def _wanted_features(self, drafting: Drafting | None) -> common_pb2.FeatureRequest | None:
        """What the drafter wants of the target, also when its worker only comes later."""
        if drafting is None:
            return None
        drafter = drafting.drafter or self.request.drafter or await self.workers.default_drafter()
        return self.workers.features(drafter)

    async def _open_target(
        self,
        owned: Ownership,
        links: contextlib.AsyncExitStack,
        features: common_pb2.FeatureRequest | None,
        held: WorkerHandle | None = None,
        lost: TargetLink | None = None,
    ) -> tuple[TargetLink, common_pb2.Opened]:
        """The session on the first target worker that can be reached and has room now, of those that can hold
        all that the request may come to.

        The one that holds its KV comes first, the one that was lost last. In mid-stream only the very same
        model can go on. Raises UnavailableError, OverloadedError, and HandshakeError for workers that don't
        keep the features that the drafter wants.
        """
        session = owned.session
        with self.stats.choosing("target"):
            hosts = await self.workers.targets(held.worker_id if held else "")
        if lost is not None:
            hosts = [host for host in hosts if host.fingerprint == lost.host.fingerprint]
            hosts = [host for host in hosts if host.max_context > len(session.tokens)]
            hosts.sort(key=lambda host: host.worker_id == lost.worker_id)
        failure: SplitspecError = UnavailableError(
            f"no target worker with the model of this request and room for its {len(session.tokens)} tokens "
            "is left"
        )
        for host in roomiest(hosts, self._most_tokens(owned)):
            target = TargetLink(
                host, session, self.stats, self.settings.target_timeout_s, self._left_s, features
            )
            links.callback(target.cancel)
            try:
                if features is not None:
                    host.check_features(features)
                handle = held.handle if held and held.worker_id == host.worker_id else ""
                opened = await target.open(handle, owned.kept, self._keep_kv_ms)
            except (UnavailableError, OverloadedError, HandshakeError) as error:
                log.warning("target worker unavailable", worker=host.worker_id, error=str(error))
                failure = error
            else:
                if self._keep_kv_ms:
                    owned.target = WorkerHandle(host.worker_id, target.handle)
                return target, opened
        raise failure

    def _most_tokens(self, owned: Ownership) -> int:
        """Tokens of the session at the end of the request, if nothing but max_tokens ends it."""
        assert owned.session.drawing is not None
        return owned.session.drawing.output.start + self._max_tokens

    @property
    def _max_tokens(self) -> int:
        return self.request.stop.max_tokens or self.settings.max_tokens

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
                await delivery.flush()  # when the client is what was lost, this raises it
                losses += 1
                lost = rounds.target
                log.warning("target worker lost", worker=lost.worker_id, error=str(error), losses=losses)
                lost.cancel()
                if losses == _MOST_LOSSES:
                    raise
                rounds.target, _ = await self._open_target(owned, links, lost.features, lost=lost)
                rounds.control.use_target(rounds.target.worker_id)

    def _delivery(self, owned: Ownership, note: Note, links: contextlib.AsyncExitStack) -> Delivery:
        one_token_each = self.request.one_token_per_chunk
        delivery = Delivery(self.send, owned.journal, self.stats, note.prompt_end, one_token_each)
        links.callback(delivery.cancel)
        return delivery

    async def _deliver_again(self, delivery: Delivery, emission: Emission) -> None:
        """Send what an earlier attempt has committed, from the client's offset on."""
        origins = (common_pb2.TOKEN_ORIGIN_REPEATED,) * len(emission.tokens)
        block = Block(0, emission, origins, (), self.stats.span)
        await delivery.deliver(block, self.request.resume_offset)

    async def _leave_workers(self, target: TargetLink, drafting: Drafting | None) -> None:
        """Close both streams with the KV kept."""
        try:
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                await target.close()
        except TimeoutError:
            log.warning("target worker hangs at the end", worker=target.worker_id)
        except SplitspecError as error:  # everything is committed: the next request feeds it again
            log.warning("target worker lost at the end", worker=target.worker_id, error=str(error))
        draft = drafting.link if drafting is not None else None
        if draft is not None:
            await draft.close()

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
    def _left_s(self) -> float | None:
        """What the client's deadline leaves by now."""
        return self.deadline_s and max(0.0, self.deadline_s - (time.perf_counter() - self.stats.started))

    @property
    def _keep_kv_ms(self) -> int:
        """How long workers keep the session's KV: not at all without a session of the client's own."""
        return round(self.settings.session_keep_s * 1000) if self.request.keep_kv else 0
