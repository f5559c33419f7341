from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from splitspec.errors import ConfigError, NotFoundError, SplitspecError, UnavailableError
from splitspec.registry import EmbeddedRedis, Registry, WorkerEntry
from splitspec.registry.connection import hide_password
from splitspec.registry.scripts import check_version

LEASE_MS = 60_000
PASSWORD = "s3cret"


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """A server of its own, for tests that stop it."""
    with EmbeddedRedis() as server:
        yield server


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Registry]:
    registry = await Registry.connect(url)
    try:
        yield registry
    finally:
        await registry.close()


def limit(server: EmbeddedRedis, maxmemory: str, policy: str) -> None:
    with Redis.from_url(server.url) as client:
        client.config_set("maxmemory", maxmemory)
        client.config_set("maxmemory-policy", policy)


async def test_scripts_that_were_flushed_are_loaded_again(registry: Registry, client: Redis) -> None:
    epoch = (await registry.open_session("t", "s", "a", LEASE_MS)).epoch
    client.script_flush()
    await registry.append("t", "s", epoch, 0, [1])


async def test_a_restarted_redis_just_works(server: EmbeddedRedis) -> None:
    async with connected(server.url) as registry:
        first = (await registry.open_session("t", "s", "a", LEASE_MS)).epoch
        server.stop()
        server.start()
        with pytest.raises(NotFoundError):
            await registry.append("t", "s", first, 0, [1])
        second = (await registry.open_session("t", "s", "b", LEASE_MS)).epoch
        assert second > first
        await registry.append("t", "s", second, 0, [1])


async def test_a_session_goes_on_after_a_restart(server: EmbeddedRedis) -> None:
    async with connected(server.url) as registry:
        epoch = (await registry.open_session("t", "s", "a", LEASE_MS)).epoch
        await registry.append("t", "s", epoch, 0, [1, 2])
        server.stop()
        server.start()
        await registry.restore("t", "s", epoch, "a", LEASE_MS, [1, 2, 3])
        await registry.append("t", "s", epoch, 3, [4])
        await registry.end("t", "s", epoch, LEASE_MS)
        assert (await registry.open_session("t", "s", "b", LEASE_MS)).token_ids == (1, 2, 3, 4)


async def test_sessions_survive_a_restart_when_kept_on_disk(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        async with connected(server.url) as registry:
            epoch = (await registry.open_session("t", "s", "a", LEASE_MS)).epoch
            await registry.append("t", "s", epoch, 0, [1, 2])
            server.stop()
            server.start()
            await registry.append("t", "s", epoch, 2, [3])
            record = await registry.open_session("t", "s", "a", LEASE_MS)
    assert record.token_ids == (1, 2, 3)


async def test_no_redis_at_connect(server: EmbeddedRedis) -> None:
    server.stop()
    with pytest.raises(UnavailableError, match=f"{server.url}, expected a running server"):
        await Registry.connect(server.url)


async def test_redis_goes_away_and_comes_back(server: EmbeddedRedis) -> None:
    async with connected(server.url) as registry:
        server.stop()
        calls = [
            registry.open_session("t", "s", "a", LEASE_MS),
            registry.append("t", "s", 1, 0, [1]),
            registry.renew("t", "s", 1),
            registry.restore("t", "s", 1, "a", LEASE_MS, [1]),
            registry.save("t", "s", 1, target=None, draft=None, revision=1, round_number=1, length=0),
            registry.save_request("t", "s", 1, b"request"),
            registry.end("t", "s", 1, 0),
            registry.delete_session("t", "s"),
            registry.register_worker(WorkerEntry("draft", "w", "127.0.0.1:1", b""), LEASE_MS),
            registry.unregister_worker("draft", "w"),
            registry.workers("draft"),
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [UnavailableError] * len(calls)
        server.start()
        assert (await registry.open_session("t", "s", "a", LEASE_MS)).token_ids == ()


async def test_a_redis_that_never_answers_is_unavailable() -> None:
    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(ignore, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError):
            await Registry.connect(f"redis://127.0.0.1:{port}/0?socket_timeout=0.05")


async def test_a_cancelled_call_leaves_its_answer_to_no_one(registry: Registry, redis_url: str) -> None:
    """With one connection, the answer of a cancelled call would be read by the next."""
    async with connected(f"{redis_url}?max_connections=1") as single:
        await single.register_worker(WorkerEntry("draft", "w", "127.0.0.1:1", b""), LEASE_MS)
        for steps in range(12):
            call = asyncio.create_task(single.workers("draft"))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert await single.workers("target") == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://localhost",
        "redis://localhost:port",
        "redis://[::1",
        "redis://localhost?unknown=1",
        "redis://localhost?socket_timeout=soon",
        f"redis://:{PASSWORD}/@localhost:6379",
        f"redis://:{PASSWORD}?@localhost:6379",
    ],
)
async def test_a_wrong_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="expected redis://") as raised:
        await Registry.connect(url)
    assert PASSWORD not in "".join(traceback.format_exception(raised.value))


async def test_a_password_is_never_shown(server: EmbeddedRedis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Redis.from_url(server.url) as client:
        client.config_set("requirepass", PASSWORD)
    url = server.url.replace("redis://", f"redis://:{PASSWORD}@")
    errors: list[SplitspecError] = []
    async with connected(url) as registry:
        wrong = [server.url, url.replace(PASSWORD, PASSWORD + "x"), f"{server.url}?password={PASSWORD}x"]
        for wrong_url in wrong:
            with pytest.raises(ConfigError, match="expected another user or password") as refused:
                await Registry.connect(wrong_url)
            errors.append(refused.value)
        server.stop()
        for call in (registry.renew("t", "s", 1), Registry.connect(url)):
            with pytest.raises(UnavailableError, match=r"redis://\*\*\*@127.0.0.1") as away:
                await call
            errors.append(away.value)
    for error in errors:
        assert PASSWORD not in "".join(traceback.format_exception(error))
    assert PASSWORD not in caplog.text + repr(registry)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost", "redis://localhost"),
        ("redis://10.0.0.1:7/2", "redis://10.0.0.1:7/2"),
        (f"rediss://user:{PASSWORD}@host:7/2", "rediss://***@host:7/2"),
        (f"redis://host/0?password={PASSWORD}", "redis://host/0"),
        (f"unix://:{PASSWORD}@/run/redis.sock", "unix://***@/run/redis.sock"),
        (f"redis://:{PASSWORD}/x@host", "***"),
        (f"redis://user:12#{PASSWORD}@host", "***"),
        (f"user:{PASSWORD}", "***"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert hide_password(url) == shown


@pytest.mark.parametrize("policy", ["volatile-lru", "allkeys-random", "volatile-ttl"])
async def test_a_server_that_evicts_keys_is_refused(server: EmbeddedRedis, policy: str) -> None:
    limit(server, "64mb", policy)
    with pytest.raises(ConfigError, match=f"{server.url} has maxmemory-policy {policy}.*expected noeviction"):
        await Registry.connect(server.url)


@pytest.mark.parametrize(("maxmemory", "policy"), [("64mb", "noeviction"), ("0", "allkeys-lru")])
async def test_servers_that_evict_nothing(server: EmbeddedRedis, maxmemory: str, policy: str) -> None:
    limit(server, maxmemory, policy)
    async with connected(server.url) as registry:
        assert await registry.workers("draft") == []


async def test_evictions_are_seen_where_the_configuration_is_hidden(server: EmbeddedRedis) -> None:
    limit(server, "64mb", "volatile-lru")
    with Redis.from_url(server.url) as client:
        client.acl_setuser("default", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-config"])
    with pytest.raises(ConfigError, match="volatile-lru"):
        await Registry.connect(server.url)


async def test_a_server_that_hides_its_policy_is_trusted(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def info(client: AsyncRedis) -> dict[str, str]:
        return {"redis_version": "7.2.0"}

    monkeypatch.setattr(AsyncRedis, "info", info)
    async with connected(server.url) as registry:
        assert await registry.workers("draft") == []


@pytest.mark.parametrize("version", ["6.2.0", "6.2.5", "7.0.15", "8.0.0", "10.1"])
def test_versions_that_serve(version: str) -> None:
    check_version(version, "redis://host")


@pytest.mark.parametrize("version", ["5.0.14", "6.0.16"])
def test_versions_that_are_too_old(version: str) -> None:
    with pytest.raises(ConfigError, match=f"redis://host has version {version}, expected at least 6.2"):
        check_version(version, "redis://host")
