"""A session's owner, and a look at what it leaves in Redis."""

from __future__ import annotations

import asyncio

from redis import Redis

from splitspec.registry import Registry, SessionRecord, WorkerHandle

LEASE_MS = 60_000
TARGET = WorkerHandle("target-1", "kv-1")
DRAFT = WorkerHandle("draft-1", "kv-2", drafter="model")
REQUEST = bytes(range(256))
CALLS = ["append", "begin", "renew", "restore", "save", "save_request"]


async def open_session(registry: Registry, owner: str = "a", lease_ms: int = LEASE_MS) -> SessionRecord:
    return await registry.open_session("t", "s", owner, lease_ms)


async def call_as_owner(registry: Registry, call: str, epoch: int) -> None:
    """One of the calls that are an owner's alone; to an empty session each brings a change."""
    session = ("t", "s", epoch)
    match call:
        case "append":
            await registry.append(*session, 0, [1])
        case "begin":
            await registry.begin(*session, 0, [1], 1, REQUEST)
        case "renew":
            await registry.renew(*session)
        case "restore":
            await registry.restore(*session, "a", LEASE_MS, [1])
        case "save":
            await registry.save(*session, target=TARGET, draft=DRAFT, revision=1, round_number=1, length=0)
        case "save_request":
            await registry.save_request(*session, REQUEST)
        case "end and keep":
            await registry.end(*session, keep_ms=LEASE_MS)
        case "end":
            await registry.end(*session, keep_ms=0)


async def outlive(lease_ms: int) -> None:
    """Return when a lease that was taken before the call has run out."""
    await asyncio.sleep(lease_ms / 1000 + 0.005)


def keys_of(client: Redis) -> list[bytes]:
    return list(client.scan_iter())


def contents(client: Redis) -> list[bytes | None]:
    """What lies in Redis."""
    return [client.dump(key) for key in sorted(keys_of(client))]
