"""Real servers in states that they come into in production."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from splitspec.registry import EmbeddedRedis

_LIMIT_S = 120.0


class ClusterNode(EmbeddedRedis):
    """A node of a cluster that serves no keys yet."""

    def _options(self) -> list[str]:
        config = f"nodes-{self._port}.conf"
        return [*super()._options(), "--cluster-enabled", "yes", "--cluster-config-file", config]


class Sentinel(EmbeddedRedis):
    """A Sentinel that alone decides on the primary of the service "main"."""

    def __init__(self, directory: Path, primary: EmbeddedRedis) -> None:
        super().__init__(directory)
        self._primary_port = port_of(primary)

    def _options(self) -> list[str]:
        assert self._directory is not None
        config = self._directory / "sentinel.conf"
        config.write_text(
            f"bind 127.0.0.1\nport {self._port}\n"
            f"sentinel monitor main 127.0.0.1 {self._primary_port} 1\n"
            "sentinel down-after-milliseconds main 500\n"
        )
        return [str(config), "--sentinel"]


def port_of(server: EmbeddedRedis) -> int:
    return int(server.url.rpartition(":")[2].partition("/")[0])


def until(check: Callable[[], bool]) -> None:
    """Return when it is so; an error of Redis is not yet. Fails at the limit."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(RedisError):
            if check():
                return
        time.sleep(0.01)
    pytest.fail(f"it didn't become so within {_LIMIT_S:g} s")


def replicate(replica: EmbeddedRedis, primary: EmbeddedRedis) -> None:
    """Return when the replica has all that the primary has."""
    with Redis.from_url(replica.url) as client, Redis.from_url(primary.url) as source:
        client.replicaof("127.0.0.1", port_of(primary))
        until(lambda: client.info()["master_link_status"] == "up")
        until(lambda: source.wait(1, 1000) == 1)


@contextlib.contextmanager
def as_replica(server: EmbeddedRedis) -> Iterator[None]:
    with EmbeddedRedis() as primary, Redis.from_url(server.url) as client:
        replicate(server, primary)
        yield
        client.replicaof("NO", "ONE")


@contextlib.contextmanager
def full(server: EmbeddedRedis) -> Iterator[None]:
    with Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "1")
        yield
        client.config_set("maxmemory", "0")


@contextlib.contextmanager
def with_another_password(server: EmbeddedRedis) -> Iterator[None]:
    with Redis.from_url(server.url) as client:
        client.config_set("requirepass", "another")
        client.client_kill_filter(_type="normal", skipme=True)
        yield
        client.config_set("requirepass", "")


@contextlib.contextmanager
def that_may_not(server: EmbeddedRedis) -> Iterator[None]:
    with Redis.from_url(server.url) as client:
        client.acl_setuser("default", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-evalsha"])
        yield
        client.acl_setuser("default", enabled=True, nopass=True, keys=["*"], commands=["+@all"])


@contextlib.contextmanager
def that_cannot_save(server: EmbeddedRedis) -> Iterator[None]:
    with Redis.from_url(server.url) as client:
        with tempfile.TemporaryDirectory() as lost:
            client.config_set("dir", lost)
        client.config_set("save", "3600 1")
        client.bgsave()
        until(lambda: client.info()["rdb_last_bgsave_status"] == "err")
        yield
        client.config_set("save", "")


@contextlib.contextmanager
def that_loads(server: EmbeddedRedis) -> Iterator[None]:
    """It answers between pieces of 2 MiB, which take it a tenth of a second each."""
    with Redis.from_url(server.url) as client:
        client.mset({f"filler:{n}": os.urandom(100_000) for n in range(200)})
        client.config_set("key-load-delay", "5000")
        with Redis.from_url(server.url) as other:
            loading = other.connection_pool.get_connection()
            loading.send_command("DEBUG", "RELOAD")
            until(lambda: client.info()["loading"] == 1)
            yield
            until(lambda: client.info()["loading"] == 0)
            loading.disconnect()


@contextlib.asynccontextmanager
async def relay(target: Callable[[], int], context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of an address that leads to another one for each new connection. context: TLS's."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", target())
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]
