"""The delay proxy: when each piece is due, by a clock of its own; and real bytes through it."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import AsyncIterator, Callable

import delay_proxy  # benchmarks/delay_proxy.py
import grpc
import pytest
from delay_proxy import DelayProxy, Leg, Line
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer


class FakeClock:
    """A loop's clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object], /) -> None:
        heapq.heappush(self._calls, (when, len(self._calls), callback))

    def run_until(self, end: float) -> None:
        while self._calls and self._calls[0][0] <= end:
            self.now, _, callback = heapq.heappop(self._calls)
            callback()
        self.now = end


class Recorded:
    """A line whose pieces are kept with the milliseconds of their arrival."""

    def __init__(self, leg: Leg) -> None:
        self.leg = leg
        self.clock = FakeClock()
        self.arrived: list[tuple[float, bytes | None]] = []
        self.line = Line(self.clock, lambda: self.leg, random.Random(1), self._write)

    def _write(self, piece: bytes | None) -> None:
        self.arrived.append((round(self.clock.now * 1e3, 6), piece))

    def push(self, at_ms: float, piece: bytes | None) -> None:
        self.clock.run_until(at_ms / 1e3)
        self.line.push(piece)

    def end(self) -> list[tuple[float, bytes | None]]:
        self.clock.run_until(1e6)
        return self.arrived


def test_each_piece_is_delayed_by_itself() -> None:
    line = Recorded(Leg(delay_ms=10))
    for at_ms, piece in ((0, b"a"), (1, b"b"), (50, b"c"), (50, None)):
        line.push(at_ms, piece)
    assert line.end() == [(10, b"a"), (11, b"b"), (60, b"c"), (60, None)]


def test_without_a_delay_it_passes_at_once() -> None:
    line = Recorded(Leg())
    line.push(3, b"a")
    assert line.arrived == [(3, b"a")]


def test_bytes_wait_for_one_another_on_a_narrow_link() -> None:
    """At 1 byte per ms: the second piece is sent when the first is, and a link that rested owes nothing."""
    line = Recorded(Leg(delay_ms=10, bytes_per_s=1000))
    for at_ms, size in ((0, 5), (2, 3), (100, 4)):
        line.push(at_ms, bytes(size))
    assert line.end() == [(15, bytes(5)), (18, bytes(3)), (114, bytes(4))]


def test_jitter_keeps_the_order_and_its_bounds() -> None:
    line = Recorded(Leg(delay_ms=10, jitter_ms=5))
    for at_ms in range(100):
        line.push(at_ms, bytes([at_ms]))
    arrived = line.end()
    assert [piece for _, piece in arrived] == [bytes([index]) for index in range(100)]
    added = [at_ms - index for index, (at_ms, _) in enumerate(arrived)]
    assert all(10 <= ms <= 15 for ms in added)
    assert max(added) - min(added) > 3


def test_a_leg_can_change_but_nothing_overtakes() -> None:
    line = Recorded(Leg(delay_ms=50))
    line.push(0, b"a")
    line.leg = Leg(delay_ms=1)
    line.push(10, b"b")
    line.push(60, b"c")
    assert line.end() == [(50, b"a"), (50, b"b"), (61, b"c")]


@pytest.mark.parametrize("wrong", [-1.0, math.inf, math.nan])
def test_a_leg_is_checked(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"jitter_ms is .*, expected a number from 0 on"):
        Leg(jitter_ms=wrong)


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    """A server that says what it hears, and ends when it is told the end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    server.close()
    await server.wait_closed()


async def test_bytes_come_out_as_they_went_in(echo: str) -> None:
    """Both ways under jitter, up to the end of the stream."""
    content = random.Random(2).randbytes(1_000_000)
    leg = Leg(delay_ms=1, jitter_ms=3)
    async with DelayProxy(echo, up=leg, down=leg) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)

        async def send() -> None:
            for start in range(0, len(content), 10_000):
                writer.write(content[start : start + 10_000])
                await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        assert await reader.read(-1) == content
        await sending
        writer.close()
        await writer.wait_closed()


async def test_each_direction_has_its_leg_and_they_change(echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    legs: list[tuple[bytes | None, Leg]] = []

    class Spied(Line):
        def push(self, piece: bytes | None) -> None:
            legs.append((piece, self.leg()))
            super().push(piece)

    monkeypatch.setattr(delay_proxy, "Line", Spied)
    up, down, later = Leg(delay_ms=1), Leg(delay_ms=2), Leg(delay_ms=3)
    async with DelayProxy(echo, up=up, down=down) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"a")
        assert await reader.read(1) == b"a"
        proxy.down = later
        writer.write(b"b")
        assert await reader.read(1) == b"b"
        assert legs == [(b"a", up), (b"a", down), (b"b", up), (b"b", later)]
        writer.close()
        await writer.wait_closed()


async def test_a_grpc_call_through_a_proxy_that_was_there_before_its_upstream() -> None:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    leg = Leg(delay_ms=2, jitter_ms=2, bytes_per_s=1e6)
    async with DelayProxy(up=leg, down=leg) as proxy:
        proxy.upstream = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(proxy.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await server.stop(0)


async def test_without_an_upstream_connections_end_at_once() -> None:
    async with DelayProxy() as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_a_port_that_is_taken_is_an_error(echo: str) -> None:
    with pytest.raises(OSError, match="address already in use"):
        async with DelayProxy(port=int(echo.rpartition(":")[2])):
            pass
