"""The session's journal in Redis, written beside the rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import structlog

from coordinator.session import Session
from splitspec.errors import NotFoundError, OutOfSyncError, SplitspecError, StaleError, UnavailableError
from splitspec.registry import Registry

log = structlog.get_logger()

#: An acknowledgement takes well under a millisecond. After this long a chunk goes out without it.
_PATIENCE_S = 0.25
_RETRY_S = 0.1


class Journal:
    """Appends the session's committed tokens as they are asked for. Use as an async context manager.

    With Redis away, tokens wait here and are appended when it is back; a Redis that has lost the session or
    its last tokens gets them again. A refusal, when another coordinator owns the session, is raised by
    `acknowledged`.
    """

    def __init__(self, registry: Registry, session: Session, owner: str, lease_s: float) -> None:
        """The session's tokens at this point are those that the journal holds."""
        self._registry = registry
        self._session = session
        self._owner = owner
        self._lease_ms = round(lease_s * 1000)
        self._length = self._asked = len(session.tokens)
        self._away = False
        self._refusal: SplitspecError | None = None
        #: Of a request that begins with the next append.
        self._request: bytes | None = None
        self._begun = False
        self._trouble = ""
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        #: Called when Redis had lost the session, and with it all but the tokens.
        self.on_restored: Callable[[], Awaitable[None]] | None = None

    async def __aenter__(self) -> Self:
        self._writing = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing.cancel()

    def begin(self, kept: int, request: bytes) -> None:
        """A request begins: its tokens follow the first `kept`, in the place of what the journal has there.

        request: stored together with the first of them.
        """
        self._length = self._asked = kept
        self._request, self._begun = request, True

    @property
    def begun(self) -> bool:
        """A request has begun."""
        return self._begun

    def rewrite(self) -> bool:
        """Redis has lost some of what it had: append all of it again. False before the request has begun."""
        if self._begun:
            self._length = 0
        return self._begun

    async def stop(self) -> None:
        """Append nothing more; returns when nothing is under way."""
        self._writing.cancel()
        await asyncio.wait({self._writing})

    @property
    def asked(self) -> int:
        """Tokens of the session that were asked for, so that a client may have seen them."""
        return self._asked

    @property
    def complete(self) -> bool:
        """Every token that was asked for is in the journal."""
        return self._holds(self._asked)

    async def acknowledged(self, length: int, patience_s: float = _PATIENCE_S) -> bool:
        """Whether the session's first `length` tokens are in the journal.

        Waits for it, but not longer than the patience, and not at all while Redis is known to be away.
        Raises StaleError when another coordinator owns the session.
        """
        self._asked = max(self._asked, length)
        self._wake.set()
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._decided(length)), patience_s)
            except TimeoutError:
                self._away = True
        if self._refusal is not None:
            raise self._refusal
        return self._holds(length)

    async def prompted(self, limit_s: float) -> None:
        """Wait until Redis has the request with its prompt. Raises as `flush` does."""
        self._asked = max(self._asked, len(self._session.tokens))
        await self.flush(limit_s)

    async def flush(self, limit_s: float) -> None:
        """Wait until the journal is complete. Raises UnavailableError at the limit, StaleError."""
        deadline = asyncio.get_running_loop().time() + limit_s
        while not self.complete:
            if asyncio.get_running_loop().time() >= deadline:
                missing = self._asked - self._length
                raise UnavailableError(
                    f"the last {missing} tokens of session {self._session.session_id!r} aren't in Redis yet: "
                    f"{self._trouble or 'it takes long'}",
                    retry_after_s=1.0,
                )
            self._away = False
            await self.acknowledged(self._asked, _RETRY_S)

    def _decided(self, length: int) -> bool:
        return self._holds(length) or self._away or self._refusal is not None

    def _holds(self, length: int) -> bool:
        return self._length >= length and self._request is None

    async def _write(self) -> None:
        """Append what is committed whenever more is asked for, until the session is refused."""
        while self._refusal is None:
            await self._wake.wait()
            self._wake.clear()
            while self._refusal is None and not self.complete:
                await self._append()
                async with self._changed:
                    self._changed.notify_all()

    async def _append(self) -> None:
        session, start = self._session, self._length
        tokens = session.tokens[start : self._asked]
        key = (session.tenant, session.session_id, session.epoch)
        try:
            if self._request is None:
                await self._registry.append(*key, start, tokens, session.round)
            else:
                await self._registry.begin(*key, start, tokens, session.round, self._request)
        except (NotFoundError, OutOfSyncError) as error:
            log.warning("journal written again", session=session.session_id, error=str(error))
            await self._restore()
        except UnavailableError as error:
            if not self._away:
                log.warning("journal behind", session=session.session_id, error=str(error))
            self._away, self._trouble = True, str(error)
            await asyncio.sleep(_RETRY_S)
        except SplitspecError as error:
            self._refusal = error
        else:
            self._length, self._away, self._request = start + len(tokens), False, None

    async def _restore(self) -> None:
        session = self._session
        tokens = session.tokens[: self._asked]
        key = (session.tenant, session.session_id, session.epoch)
        try:
            await self._registry.restore(*key, self._owner, self._lease_ms, tokens, session.round)
            if self.on_restored is not None:
                await self.on_restored()
        except UnavailableError as error:
            self._away, self._trouble = True, str(error)
            await asyncio.sleep(_RETRY_S)
        except OutOfSyncError as error:  # tokens of someone else: the session isn't ours any more
            self._refusal = StaleError(str(error))
        except SplitspecError as error:
            self._refusal = error
        else:
            self._length, self._away, self._request = len(tokens), False, None
