from __future__ import annotations

import asyncio

from redis import Redis
from redis.crc import key_slot

from splitspec.registry import Registry, WorkerEntry

LEASE_MS = 60_000
ONE = WorkerEntry("target", "w1", "127.0.0.1:7001", b"\x00described\n\xff")
TWO = WorkerEntry("target", "w2", "127.0.0.1:7002", b"")
DRAFT = WorkerEntry("draft", "w1", "127.0.0.1:7003", b"draft")


async def test_workers_are_listed_by_kind(registry: Registry) -> None:
    for entry in (TWO, ONE, DRAFT):
        await registry.register_worker(entry, LEASE_MS)
    assert await registry.workers("target") == [ONE, TWO]
    assert await registry.workers("draft") == [DRAFT]


async def test_a_heartbeat_replaces_the_entry(registry: Registry) -> None:
    await registry.register_worker(ONE, LEASE_MS)
    moved = WorkerEntry("target", "w1", "127.0.0.1:7009", b"moved")
    await registry.register_worker(moved, LEASE_MS)
    assert await registry.workers("target") == [moved]


async def test_a_heartbeat_renews_the_lease(registry: Registry) -> None:
    await registry.register_worker(ONE, 1)
    await registry.register_worker(ONE, LEASE_MS)
    await asyncio.sleep(0.006)
    assert await registry.workers("target") == [ONE]


async def test_a_worker_that_leaves_is_gone_at_once(registry: Registry, client: Redis) -> None:
    await registry.register_worker(ONE, LEASE_MS)
    await registry.register_worker(TWO, LEASE_MS)
    await registry.unregister_worker("target", "w1")
    await registry.unregister_worker("target", "unknown")
    assert await registry.workers("target") == [TWO]
    await registry.unregister_worker("target", "w2")
    assert client.keys() == []


async def test_a_crashed_worker_is_reaped(registry: Registry, client: Redis) -> None:
    await registry.register_worker(TWO, LEASE_MS)
    await registry.register_worker(ONE, 1)
    await asyncio.sleep(0.006)
    assert await registry.workers("target") == [TWO]
    leases, addresses, descriptions = (
        client.keys(f"*:{name}")[0] for name in ("leases", "addresses", "descriptions")
    )
    assert client.zrange(leases, 0, -1) == [b"w2"]
    assert client.hkeys(addresses) == client.hkeys(descriptions) == [b"w2"]


async def test_the_directory_ends_with_its_last_lease(registry: Registry, client: Redis) -> None:
    await registry.register_worker(ONE, LEASE_MS)
    await registry.register_worker(TWO, 1)
    keys = list(client.scan_iter())
    assert len(keys) == 3
    assert all(LEASE_MS / 2 < client.pttl(key) <= LEASE_MS for key in keys)
    assert len({key_slot(key) for key in keys}) == 1
