"""Sessions and the worker directory in Redis: what has to outlive a coordinator."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import quote

import numpy as np

from splitspec.errors import NotFoundError, OutOfSyncError, SessionBusyError, StaleError
from splitspec.registry.records import SessionRecord, WorkerEntry, WorkerHandle, WorkerKind
from splitspec.registry.scripts import Scripts

_MAX_RETRY_AFTER_S = 1.0


class Registry:
    """Every method is one script, hence atomic, and safe to repeat; time is that of Redis.

    Each raises UnavailableError when Redis can't be reached. All keys carry a time to live, so that
    a crash leaves nothing for ever.

    What the owner of a session calls is fenced by its epoch: NotFoundError when Redis holds no such
    session (its data was lost, or its time ran out), StaleError when the epoch doesn't own it.
    """

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    @classmethod
    async def connect(cls, url: str) -> Registry:
        """Raises ConfigError for a wrong url, password, version or a server that evicts keys.

        Raises UnavailableError without a server.
        """
        return cls(await Scripts.connect(url))

    async def close(self) -> None:
        await self._scripts.close()

    async def open_session(
        self,
        tenant: str,
        session_id: str,
        owner: str,
        lease_ms: int,
        at_least: int = 0,
        since: int = 0,
        accept: Callable[[SessionRecord], None] = lambda record: None,
    ) -> SessionRecord:
        """Make `owner` the session's owner under a newer epoch than any that the session had.

        The epoch is Redis' time in microseconds, or the last one plus 1 where the clock was set back. So
        it doesn't repeat either when the session was deleted or Redis lost its data.
        owner: unique to the request, so that a repeated call isn't taken for another request.
        lease_ms: how long the ownership lasts without append, renew or save.
        at_least: tokens that the session should hold. since: epoch that it should have reached.
        accept: called, before anything is changed, with the record of one that holds fewer, is older or was
        abandoned (epoch 0: there is none); raises to leave it as it is.
        Raises SessionBusyError while another owner's lease runs.
        """
        accepted = ""
        while True:
            args = (owner, lease_ms, at_least, since, accepted)
            outcome, detail, *abandoned = await self._run("open_session", tenant, session_id, *args)
            if outcome == b"busy":
                raise _busy(session_id, detail)
            record = _record(tenant, session_id, detail)
            if outcome == b"ok":
                return record
            accept(replace(record, abandoned=bool(abandoned[0])))
            accepted = str(record.epoch)

    async def append(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        offset: int,
        token_ids: Sequence[int],
        round_number: int = 0,
    ) -> None:
        """Append committed tokens to the journal, whose length must be `offset`; renews the lease.

        round_number: the last round taken, so that an owner who follows a crash repeats none of the rounds
        that the tokens come from. A repeated call succeeds. Raises OutOfSyncError when the journal has
        another length.
        """
        args = (offset, _to_bytes(token_ids), round_number)
        outcome, *detail = await self._fenced("append", tenant, session_id, epoch, *args)
        if outcome == b"out_of_sync":
            raise OutOfSyncError(
                f"the journal of session {session_id!r} holds {detail[0]} tokens, and not those to be "
                f"appended at {offset}: expected an append where it ends"
            )

    async def begin(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        kept: int,
        token_ids: Sequence[int],
        round_number: int,
        request: bytes,
    ) -> None:
        """Put a request's prompt behind the journal's first `kept` tokens, and renew the lease.

        What was behind them is given up: the request goes on from another text. request: stored with it, as
        by save_request; empty for nothing. Once under an epoch: a repeated call changes nothing.
        round_number: as for append. Raises OutOfSyncError when the journal is shorter.
        """
        args = (kept, _to_bytes(token_ids), round_number, request)
        outcome, *detail = await self._fenced("begin", tenant, session_id, epoch, *args)
        if outcome == b"out_of_sync":
            raise OutOfSyncError(
                f"the journal of session {session_id!r} holds {detail[0]} tokens, expected at least {kept}"
            )

    async def renew(self, tenant: str, session_id: str, epoch: int) -> None:
        """Renew the owner's lease."""
        await self._fenced("renew", tenant, session_id, epoch)

    async def restore(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        owner: str,
        lease_ms: int,
        token_ids: Sequence[int],
        round_number: int = 0,
    ) -> None:
        """Write a session that Redis lost again, for the owner that goes on with it.

        epoch, owner and lease_ms: those of open_session. token_ids: the whole journal. round_number: as for
        append. What was saved is lost, and is saved again by the next save and save_request.
        A session whose request has begun, and that is still there under `epoch` and `owner`, keeps what was
        saved, and its journal is lengthened to token_ids. Raises OutOfSyncError when they don't begin with
        it, StaleError when the session has a newer epoch or another owner, or was ended.
        """
        args = (owner, lease_ms, _to_bytes(token_ids), round_number)
        outcome, *detail = await self._fenced("restore", tenant, session_id, epoch, *args)
        if outcome == b"out_of_sync":
            raise OutOfSyncError(
                f"the journal of session {session_id!r} holds {detail[0]} tokens, and not the first of the "
                f"{len(token_ids)} to be restored: expected one that they lengthen"
            )

    async def save(
        self,
        tenant: str,
        session_id: str,
        epoch: int,
        *,
        target: WorkerHandle | None,
        draft: WorkerHandle | None,
        revision: int,
        round_number: int,
        length: int,
    ) -> None:
        """Store what the session's next request needs, and renew the lease.

        length: tokens of the journal. Raises OutOfSyncError when it has another length.
        """
        fields = (_pack(target), _pack(draft), revision, round_number, length)
        outcome, *detail = await self._fenced("save", tenant, session_id, epoch, *fields)
        if outcome == b"out_of_sync":
            raise OutOfSyncError(
                f"the journal of session {session_id!r} holds {detail[0]} tokens, expected {length}"
            )

    async def save_request(self, tenant: str, session_id: str, epoch: int, request: bytes) -> None:
        """Store the session's last request until the next one is, and renew the lease.

        request: opaque, what its owner needs to know it again, and the conversation so far.
        """
        await self._fenced("save_request", tenant, session_id, epoch, request)

    async def end(self, tenant: str, session_id: str, epoch: int, keep_ms: int) -> None:
        """Give up ownership; keep record and journal for keep_ms, or delete them when it is 0.

        Not keeping a session that isn't there succeeds. Raises StaleError when another request has opened
        the session since.
        """
        await self._fenced("end_session", tenant, session_id, epoch, keep_ms)

    async def delete_session(
        self, tenant: str, session_id: str, remember_ms: int = 600_000
    ) -> SessionRecord | None:
        """Delete a session and return what was there, so that its handles can be freed; None without one.

        remember_ms: how long it can be told from one that Redis lost.
        Raises SessionBusyError while a request runs on it.
        """
        outcome, *detail = await self._run("delete_session", tenant, session_id, remember_ms)
        if outcome == b"busy":
            raise _busy(session_id, detail[0])
        return _record(tenant, session_id, detail[0]) if outcome == b"ok" else None

    async def register_worker(self, entry: WorkerEntry, lease_ms: int) -> None:
        """Enter a worker, or renew its lease: called again well within lease_ms."""
        args = (entry.worker_id, entry.address, entry.description, lease_ms)
        await self._scripts.run("register_worker", _directory_keys(entry.kind), *args)

    async def unregister_worker(self, kind: WorkerKind, worker_id: str) -> None:
        """Remove a worker; an unknown one is fine."""
        await self._scripts.run("unregister_worker", _directory_keys(kind), worker_id)

    async def workers(self, kind: WorkerKind) -> list[WorkerEntry]:
        """The workers whose lease runs, in order of id."""
        entries = await self._scripts.run("workers", _directory_keys(kind))
        return [
            WorkerEntry(kind, worker_id.decode(), address.decode(), description)
            for worker_id, address, description in entries
        ]

    async def _run(self, script: str, tenant: str, session_id: str, *args: str | int | bytes) -> list[Any]:
        reply: list[Any] = await self._scripts.run(script, _session_keys(tenant, session_id), *args)
        return reply

    async def _fenced(
        self, script: str, tenant: str, session_id: str, epoch: int, *args: str | int | bytes
    ) -> list[Any]:
        reply = await self._run(script, tenant, session_id, epoch, *args)
        if reply[0] == b"none":
            raise NotFoundError(
                f"Redis has no session {session_id!r}, expected the one of epoch {epoch}: Redis lost it, or "
                "it was deleted or its time ran out"
            )
        if reply[0] == b"stale":
            raise StaleError(
                f"session {session_id!r} isn't owned under epoch {epoch} any more, expected its owner: the "
                f"request was ended or another one took over (Redis has epoch {int(reply[1])})"
            )
        return reply


def _session_keys(tenant: str, session_id: str) -> tuple[str, str]:
    """Record and journal, in one hash slot. Quoted, so that no name reaches into another tenant's."""
    tag = f"{quote(tenant, safe='')}/{quote(session_id, safe='')}"
    return f"splitspec:{{{tag}}}:record", f"splitspec:{{{tag}}}:journal"


def _directory_keys(kind: WorkerKind) -> tuple[str, str, str]:
    """Leases, addresses and descriptions, in one hash slot."""
    prefix = f"splitspec:{{{kind}-workers}}"
    return f"{prefix}:leases", f"{prefix}:addresses", f"{prefix}:descriptions"


def _record(tenant: str, session_id: str, fields: list[Any]) -> SessionRecord:
    epoch, target, draft, revision, round_number, request, journal = fields
    return SessionRecord(
        tenant=tenant,
        session_id=session_id,
        epoch=int(epoch or 0),
        token_ids=tuple(np.frombuffer(journal or b"", dtype="<u4").tolist()),
        target=_unpack(target),
        draft=_unpack(draft),
        revision=int(revision or 0),
        round_number=int(round_number or 0),
        request=request or b"",
    )


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()


def _pack(handle: WorkerHandle | None) -> str:
    return json.dumps(asdict(handle)) if handle else ""


def _unpack(packed: bytes | None) -> WorkerHandle | None:
    return WorkerHandle(**json.loads(packed)) if packed else None


def _busy(session_id: str, remaining_ms: int) -> SessionBusyError:
    return SessionBusyError(
        f"another request runs on session {session_id!r}, expected one at a time; its lease ends in "
        f"{remaining_ms} ms unless it is renewed",
        retry_after_s=min(remaining_ms / 1000, _MAX_RETRY_AFTER_S),
    )
