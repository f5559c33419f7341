"""Sessions and the worker directory in Redis: what has to outlive a coordinator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

import numpy as np

from splitspec.errors import OutOfSyncError, SessionBusyError, StaleError
from splitspec.registry.records import SessionRecord, WorkerEntry, WorkerHandle, WorkerKind
from splitspec.registry.scripts import Scripts

_MAX_RETRY_AFTER_S = 1.0


class Registry:
    """Every method is one script, hence atomic, and safe to repeat; time is that of Redis.

    Each raises UnavailableError when Redis can't be reached. All keys carry a time to live, so that
    a crash leaves nothing for ever. Redis must not evict keys (maxmemory-policy noeviction).
    """

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    @classmethod
    async def connect(cls, url: str) -> Registry:
        """Raises ConfigError for a wrong url, password or version, UnavailableError without a server."""
        return cls(await Scripts.connect(url))

    async def close(self) -> None:
        await self._scripts.close()

    async def open_session(self, tenant: str, session_id: str, owner: str, lease_ms: int) -> SessionRecord:
        """Make `owner` the session's owner under the next epoch; the first epoch of a new session is 1.

        owner: unique to the request, so that a repeated call isn't taken for another request.
        lease_ms: how long the ownership lasts without append, renew or save.
        Raises SessionBusyError while another owner's lease runs.
        """
        outcome, detail = await self._run("open_session", tenant, session_id, owner, lease_ms)
        if outcome == b"busy":
            raise _busy(session_id, detail)
        return _record(tenant, session_id, detail)

    async def append(
        self, tenant: str, session_id: str, epoch: int, offset: int, token_ids: Sequence[int]
    ) -> None:
        """Append committed tokens to the journal, whose length must be `offset`; renews the lease.

        A repeated call succeeds. Raises StaleError when `epoch` doesn't own the session, OutOfSyncError
        when the journal has another length.
        """
        tokens = np.asarray(token_ids, dtype="<u4").tobytes()
        outcome, *detail = await self._fenced("append", tenant, session_id, epoch, offset, tokens)
        if outcome == b"out_of_sync":
            raise OutOfSyncError(
                f"the journal of session {session_id!r} holds {detail[0]} tokens, and not those to be "
                f"appended at {offset}: expected an append where it ends"
            )

    async def renew(self, tenant: str, session_id: str, epoch: int) -> None:
        """Renew the owner's lease. Raises StaleError when `epoch` doesn't own the session."""
        await self._fenced("renew", tenant, session_id, epoch)

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
    ) -> None:
        """Store what the session's next request needs, and renew the lease.

        Raises StaleError when `epoch` doesn't own the session.
        """
        fields = (_pack(target), _pack(draft), revision, round_number)
        await self._fenced("save", tenant, session_id, epoch, *fields)

    async def end(self, tenant: str, session_id: str, epoch: int, keep_ms: int) -> None:
        """Give up ownership; keep record and journal for keep_ms, or delete them when it is 0.

        Raises StaleError when another request has opened the session since.
        """
        await self._fenced("end_session", tenant, session_id, epoch, keep_ms)

    async def delete_session(self, tenant: str, session_id: str) -> SessionRecord | None:
        """Delete a session and return what was there, so that its handles can be freed; None without one.

        Raises SessionBusyError while a request runs on it.
        """
        outcome, *detail = await self._run("delete_session", tenant, session_id)
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
        if reply[0] == b"stale":
            raise StaleError(
                f"session {session_id!r} isn't owned under epoch {epoch} any more, expected its owner: the "
                f"request was ended or another one took over (Redis has epoch {int(reply[1])}, 0 for none)"
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
    epoch, target, draft, revision, round_number, journal = fields
    return SessionRecord(
        tenant=tenant,
        session_id=session_id,
        epoch=int(epoch),
        token_ids=tuple(np.frombuffer(journal or b"", dtype="<u4").tolist()),
        target=_unpack(target),
        draft=_unpack(draft),
        revision=int(revision or 0),
        round_number=int(round_number or 0),
    )


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
