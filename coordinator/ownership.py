"""A session while this coordinator owns it: its lease, its journal, and what is left when it goes."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from coordinator.claims import Claim, Left, LeftSessions
from coordinator.journal import Journal
from coordinator.session import Session
from splitspec.config import CoordinatorSettings
from splitspec.errors import (
    NotFoundError,
    OutOfSyncError,
    SessionBusyError,
    SplitspecError,
    UnavailableError,
)
from splitspec.registry import Registry, SessionRecord, WorkerHandle
from splitspec.telemetry import NO_SPAN, Span, names
from splitspec.tokens import TokenLog

log = structlog.get_logger()
T = TypeVar("T")

#: Longest wait for the journal's last tokens before a session is left to be repaired.
_LEAVE_LIMIT_S = 0.5
#: Between two attempts to repair it, and longest wait for them when its next request comes.
_REPAIR_RETRY_S = 0.1
_REPAIRED_LIMIT_S = 2.0


@dataclass(eq=False)
class Use:
    """A request's use of a session. over: the request has ended. left: so has what that leaves to do."""

    request: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task)
    over: bool = False
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ending(self) -> bool:
        """The request is over or has been cancelled: the session will be free."""
        return self.over or (self.request is not None and self.request.cancelling() > 0)


@dataclass(eq=False)
class Ownership:
    """One epoch of a session. `record`: the session as it was found. `keep_s`: how long it stays afterwards.

    target, draft: who will hold its KV afterwards. note: the last request's (coordinator.retry).
    All three are as the session was found, until the request replaces them. kept: how many of the tokens
    that it was found with it still begins with. use: the request's. seen: as in `Left`.
    """

    session: Session
    record: SessionRecord
    journal: Journal
    registry: Registry
    keep_s: float
    target: WorkerHandle | None
    draft: WorkerHandle | None
    note: bytes
    kept: int
    use: Use
    seen: int = 0

    def put(self, kept: int, token_ids: Sequence[int]) -> None:
        """Let the session go on with other tokens behind the first `kept`. Workers and journal follow."""
        self.session.tokens.truncate(kept)
        self.session.tokens.extend(token_ids)
        self.kept = kept

    def begin(self, start: int, note: bytes) -> None:
        """A request begins behind the first `start` tokens: the journal takes its note with its tokens."""
        self.note = note
        self.journal.begin(start, note if self.keep_s else b"")

    async def save_note(self) -> None:
        """Store the request's note, so that a retry finds it. Raises UnavailableError, StaleError."""
        session = self.session
        if self.keep_s:
            await self.registry.save_request(session.tenant, session.session_id, session.epoch, self.note)

    async def leave(self, limit_s: float) -> None:
        """Store what the next owner needs and give the session up.

        limit_s: longest wait for a journal that is behind. Raises UnavailableError, StaleError.
        """
        if not self.keep_s:
            await self.journal.stop()  # an append that is under way would write the session again
            await self._end()
            return
        try:
            await self.journal.flush(limit_s)
            await self._save()
            await self._end()
        except (NotFoundError, OutOfSyncError) as error:
            if not self.journal.rewrite():
                raise
            log.warning("session written again", session=self.session.session_id, error=str(error))
            await self.journal.flush(limit_s)
            await self._save()
            await self._end()

    async def _save(self) -> None:
        session = self.session
        await self.registry.save(
            session.tenant,
            session.session_id,
            session.epoch,
            target=self.target,
            draft=self.draft,
            revision=session.revision,
            round_number=session.round,
            length=self.journal.asked,
        )
        await self.save_note()

    async def _end(self) -> None:
        session = self.session
        keep_ms = round(self.keep_s * 1000)
        await self.registry.end(session.tenant, session.session_id, session.epoch, keep_ms)


@dataclass(eq=False)
class Repair:
    """A session that isn't left yet, with what keeps it. trouble: why not."""

    owned: Ownership
    held: contextlib.AsyncExitStack
    trouble: UnavailableError
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, limit_s: float) -> None:
        """Go on with journal and lease until Redis is back, or the session would have ended anyway."""
        session_id, now = self.owned.session.session_id, asyncio.get_running_loop().time
        deadline = now() + limit_s
        async with self.held:
            while not self.done.is_set():
                try:
                    await self.owned.leave(_LEAVE_LIMIT_S)
                    log.info("session repaired", session=session_id)
                    self.done.set()
                except UnavailableError as error:
                    self.trouble = error
                    if now() >= deadline:
                        log.warning("session not repaired", session=session_id, error=str(error))
                        self.done.set()
                    await asyncio.sleep(_REPAIR_RETRY_S)
                except SplitspecError as error:  # another coordinator owns it by now
                    log.warning("session not repaired", session=session_id, error=str(error))
                    self.done.set()


class Owner:
    """Opens sessions for this coordinator, and repairs the records of those that Redis missed the end of."""

    def __init__(self, registry: Registry, settings: CoordinatorSettings) -> None:
        self._registry = registry
        self._lease_s = settings.session_lease_s
        self._repair_s = settings.session_keep_s
        #: What goes on by itself: its callers may be gone.
        self._running: set[asyncio.Task[Any]] = set()
        self._repairs: dict[tuple[str, str], Repair] = {}
        self._left = LeftSessions(settings.session_keep_s)
        self._uses: dict[tuple[str, str], Use] = {}

    async def when_left(self, tenant: str, session_id: str, act: Callable[[], Awaitable[T]]) -> T:
        """What `act` returns; when a request that is ending keeps the session busy, act again behind it.

        Its client knows of the end before the session is free. Raises SessionBusyError for other requests.
        """
        while True:
            try:
                return await act()
            except SessionBusyError:
                use = self._uses.get((tenant, session_id))
                if use is None or not use.ending:
                    raise
            await use.left.wait()

    @contextlib.asynccontextmanager
    async def own(
        self, tenant: str, session_id: str, keep_s: float, span: Span, claim: Claim | None = None
    ) -> AsyncIterator[Ownership]:
        """The session under a new epoch until the block ends. span: the request's.

        claim: what the request takes for granted of the session; None for one that may be new.
        Raises SessionBusyError while another request runs on it, UnavailableError without Redis or while its
        last tokens aren't there, LostTokensError. A session whose request is cancelled while it is opened or
        left is left all the same, not busy for its lease.
        """
        use = Use()
        opening = self._start(self._open(tenant, session_id, keep_s, claim, use))
        try:
            owned, held = await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._start(self._abandon(opening))
            raise
        span.set({names.EPOCH: owned.session.epoch})
        try:
            yield owned
        finally:
            use.over = True
            await asyncio.shield(self._start(self._leave(owned, held, span)))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _open(
        self, tenant: str, session_id: str, keep_s: float, claim: Claim | None, use: Use
    ) -> tuple[Ownership, contextlib.AsyncExitStack]:
        """The session, and what keeps it: its journal and the renewal of its lease."""
        # Unique to the request, so that a repeated call isn't taken for another request's.
        owner = uuid.uuid4().hex
        record = await self.when_left(
            tenant, session_id, lambda: self._open_record(tenant, session_id, owner, claim)
        )
        session = Session(
            tenant,
            session_id,
            record.epoch,
            await asyncio.to_thread(TokenLog, record.token_ids),
            record.round_number,
            record.revision,
        )
        async with contextlib.AsyncExitStack() as stack:
            journal = await stack.enter_async_context(Journal(self._registry, session, owner, self._lease_s))
            renewing = asyncio.create_task(self._renew(session))
            stack.callback(renewing.cancel)
            found = (record.target, record.draft, record.request, len(record.token_ids))
            owned = Ownership(session, record, journal, self._registry, keep_s, *found, use)
            owned.seen = max(len(record.token_ids), claim.length if claim else 0)
            journal.on_restored = owned.save_note
            self._uses[tenant, session_id] = use
            return owned, stack.pop_all()

    async def _open_record(
        self, tenant: str, session_id: str, owner: str, claim: Claim | None
    ) -> SessionRecord:
        await self._repaired((tenant, session_id))
        lease_ms = round(self._lease_s * 1000)
        if claim is None:
            return await self._registry.open_session(tenant, session_id, owner, lease_ms)
        left = self._left.get((tenant, session_id))
        return await self._registry.open_session(
            tenant,
            session_id,
            owner,
            lease_ms,
            claim.at_least(left),
            claim.since(left),
            lambda record: claim.check(record, left),
        )

    async def _abandon(self, opening: asyncio.Task[tuple[Ownership, contextlib.AsyncExitStack]]) -> None:
        """Leave a session that nobody waits for any more, once it is open."""
        with contextlib.suppress(SplitspecError):
            await self._leave(*await opening, NO_SPAN)

    async def _leave(self, owned: Ownership, held: contextlib.AsyncExitStack, span: Span) -> None:
        session = owned.session
        key = (session.tenant, session.session_id)
        before = self._left.get(key)
        changed = session.epoch if owned.journal.begun else before.changed if before else 0
        self._left[key] = Left(session.epoch, owned.journal.asked, changed, owned.seen)
        try:
            async with held:
                try:
                    with span.child(names.LEAVE):
                        await owned.leave(_LEAVE_LIMIT_S)
                except UnavailableError as error:
                    log.warning("session not left yet", session=session.session_id, error=str(error))
                    if owned.keep_s:
                        repair = self._repairs[key] = Repair(owned, held.pop_all(), error)
                        self._start(repair.run(self._repair_s)).add_done_callback(
                            lambda _: self._end_repair(key, repair)
                        )
                except SplitspecError as error:  # another coordinator owns it by now
                    log.info("session not left", session=session.session_id, error=str(error))
        finally:  # whatever happens: requests wait for it
            if self._uses.get(key) is owned.use:
                del self._uses[key]
            owned.use.left.set()

    def _end_repair(self, key: tuple[str, str], repair: Repair) -> None:
        if self._repairs.get(key) is repair:
            del self._repairs[key]

    async def _repaired(self, key: tuple[str, str]) -> None:
        """Wait for a session's repair. Raises the UnavailableError that stands in its way."""
        repair = self._repairs.get(key)
        if repair is not None:
            try:
                await asyncio.wait_for(repair.done.wait(), _REPAIRED_LIMIT_S)
            except TimeoutError:
                raise repair.trouble from None

    async def _renew(self, session: Session) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._registry.renew(session.tenant, session.session_id, session.epoch)
            except SplitspecError as error:
                log.warning("lease not renewed", session=session.session_id, error=str(error))
