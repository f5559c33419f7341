from __future__ import annotations

import asyncio
import importlib.util
import re
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitspec.cli.health import health_status
from splitspec.config import ServerSettings
from splitspec.errors import UnavailableError
from splitspec.serving import SERVER_OPTIONS, Server, proxy_option

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", sorted({name for name, _ in [*SERVER_OPTIONS, proxy_option("")]}))
def test_grpc_knows_the_option(name: str) -> None:
    # A name that gRPC doesn't know is ignored without a word.
    spec = importlib.util.find_spec("grpc._cython.cygrpc")
    assert spec is not None
    assert spec.origin is not None
    assert name.encode() in Path(spec.origin).read_bytes()


async def test_a_call_that_its_client_has_ended_is_left_in_order() -> None:
    """Also when the server is told to stop before that: the loop goes on until the call is over."""
    steps: list[str] = []
    ended, go_on = asyncio.Event(), asyncio.Event()

    async def serve(requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        try:
            await context.write(b"begun")
            await asyncio.Event().wait()
        finally:
            ended.set()
            await asyncio.shield(go_on.wait())
            steps.append("left")

    def add(server: grpc.aio.Server) -> None:
        methods: dict[str, Any] = {"M": grpc.stream_stream_rpc_method_handler(serve)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", methods)])

    async with Server(ServerSettings(port=0), [], add) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            call: Any = channel.stream_stream("/test.Service/M")()
            assert await call.read() == b"begun"
            call.cancel()
            await ended.wait()
        # Only the loop of a server that stops still runs then.
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        assert steps == []
    assert steps == ["left"]


def nothing(server: grpc.aio.Server) -> None:
    """No service but those that every server has."""


class Proxy:
    """Takes connections and notes what it is asked for; it answers nothing."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[bytes] = asyncio.Queue()
        self.url = ""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.put_nowait(await reader.readline())
        writer.close()


@pytest.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """In the environment as http_proxy and https_proxy, without any exception."""
    proxy = Proxy()
    async with await asyncio.start_server(proxy.take, "127.0.0.1") as server:
        proxy.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield proxy


@pytest.mark.parametrize("grpc_too", [False, True])
async def test_this_machine_is_not_reached_through_a_proxy(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, grpc_too: bool
) -> None:
    if grpc_too:
        monkeypatch.setenv("grpc_proxy", proxy.url)
    async with Server(ServerSettings(port=0), [], nothing) as server:
        for address in (server.address, f"localhost:{server.port}"):
            assert await health_status(address) == "SERVING"
    assert proxy.asked.empty()


async def test_other_addresses_go_through_a_proxy_when_grpc_has_one(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnavailableError, match=r"worker\.invalid"):
        await health_status("worker.invalid:50053")
    assert proxy.asked.empty()
    monkeypatch.setenv("grpc_proxy", proxy.url)
    asking = asyncio.create_task(health_status("worker.invalid:50053"))
    assert (await proxy.asked.get()).startswith(b"CONNECT worker.invalid:50053 ")
    with pytest.raises(UnavailableError):
        await asking


def test_channels_are_opened_in_one_place() -> None:
    """Any other would go through a proxy, and lack the other options."""
    folders = ("splitspec", "coordinator", "draft_worker", "target_worker", "benchmarks", "deploy")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    opening = {path.relative_to(ROOT) for path in sources if re.search(r"\w_channel\(", path.read_text())}
    assert opening == {Path("splitspec/serving.py")}


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_an_ipv6_address_with_and_without_brackets(host: str) -> None:
    async with Server(ServerSettings(host=host, port=0), [], nothing) as server:
        assert server.address == f"[::1]:{server.port}"
        assert await health_status(server.address) == "SERVING"


class RawHttp2:
    """A connection that sends nothing but pings: what gRPC's libraries do between calls."""

    PING, GOAWAY = 6, 7

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack("!HBBBL", 0, 0, 4, 0, 0))

    def ping(self) -> None:
        self._writer.write(struct.pack("!HBBBL8s", 0, 8, self.PING, 0, 0, b"keepaliv"))

    async def answer(self) -> tuple[int, bytes]:
        """The next ping that is answered, or the words that the server sends us away with."""
        while True:
            high, low, kind, flags, _ = struct.unpack("!HBBBL", await self._reader.readexactly(9))
            body = await self._reader.readexactly(high << 8 | low)
            if kind == self.GOAWAY or (kind == self.PING and flags == 1):
                return kind, body


@asynccontextmanager
async def raw_connection() -> AsyncIterator[RawHttp2]:
    async with Server(ServerSettings(port=0), [], nothing) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        yield RawHttp2(reader, writer)
        writer.close()


async def test_a_client_may_ping_between_its_calls() -> None:
    """More often than any client does by itself: as many as cost others their connection."""
    async with raw_connection() as connection:
        for _ in range(5):
            connection.ping()
            assert await connection.answer() == (RawHttp2.PING, b"keepaliv")
            await asyncio.sleep(1.05)


async def test_a_flood_of_pings_ends_the_connection() -> None:
    async with raw_connection() as connection:
        kind = RawHttp2.PING
        while kind == RawHttp2.PING:
            connection.ping()
            kind, body = await connection.answer()
        assert body.endswith(b"too_many_pings")
