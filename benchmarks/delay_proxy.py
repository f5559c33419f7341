"""A TCP proxy that adds a delay, jitter and a bandwidth limit in each direction, so that one machine can
play two sites.

    .venv/bin/python benchmarks/delay_proxy.py 7001 127.0.0.1:50053 --delay-ms 10 --jitter-ms 2

Bytes come out as they went in, so gRPC goes through; what is on its way is held in memory, which gRPC's flow
control bounds. A worker is put behind it by
`--advertise` with the proxy's address, which is what the worker tells others to reach it by.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import random
import selectors
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

#: How much later than asked for a busy machine may let a thread go on.
_SPIN_S = 0.0003


@dataclass(frozen=True, slots=True)
class Leg:
    """One direction. Bytes take delay_ms, and up to jitter_ms more, but never overtake others.

    bytes_per_s: before that they wait for one another as on a link of so many; 0 for no limit.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("delay_ms", "jitter_ms", "bytes_per_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number from 0 on")


class Clock(Protocol):
    """The part of an event loop that a line needs."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> object: ...


class _SharpClock:
    """A loop's clock whose calls come within microseconds: it waits for less, and spins for the rest."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.time = loop.time

    def call_at(self, when: float, callback: Callable[[], object], /) -> None:
        self._loop.call_at(when - _SPIN_S, self._call, when, callback)

    def _call(self, when: float, callback: Callable[[], object]) -> None:
        while self.time() < when:
            pass
        callback()


@dataclass(eq=False)
class Line:
    """What is on its way in one direction of one connection.

    leg: asked for each piece, so that it can change. write: called with each piece when it is due, and with
    None at the end.
    """

    clock: Clock
    leg: Callable[[], Leg]
    draw: random.Random
    write: Callable[[bytes | None], None]
    _queue: deque[tuple[float, bytes | None]] = field(default_factory=deque)
    #: When the link has sent what it was given, and when the last piece arrives.
    _sent: float = 0.0
    _arrived: float = 0.0

    def push(self, piece: bytes | None) -> None:
        leg, size = self.leg(), len(piece or b"")
        self._sent = max(self._sent, self.clock.time())
        self._sent += size / leg.bytes_per_s if leg.bytes_per_s else 0.0
        due = self._sent + (leg.delay_ms + self.draw.uniform(0, leg.jitter_ms)) / 1e3
        self._arrived = max(self._arrived, due)
        self._queue.append((self._arrived, piece))
        if len(self._queue) == 1:
            self._deliver()

    def _deliver(self) -> None:
        while self._queue and self._queue[0][0] <= self.clock.time():
            _, piece = self._queue.popleft()
            self.write(piece)
        if self._queue:
            self.clock.call_at(self._queue[0][0], self._deliver)


class DelayProxy:
    """Listens on loopback and passes on to `upstream`, as an async context manager.

    upstream ("host:port"; "" ends connections at once), up (towards upstream) and down can be set at any
    time. It has a thread of its own that waits by `select`, which knows microseconds: an event loop's usual
    timers are up to a millisecond late.
    """

    def __init__(
        self,
        upstream: str = "",
        *,
        up: Leg | None = None,
        down: Leg | None = None,
        port: int = 0,
        seed: int = 0,
    ) -> None:
        """port: 0 takes a free one. seed: of the jitter."""
        self.upstream = upstream
        self.up = up or Leg()
        self.down = down or Leg()
        self.port = port
        self.draw = random.Random(seed)
        self.transports: set[asyncio.Transport] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        listening: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(listening,), name="proxy", daemon=True)
        self._thread.start()
        self.port = await asyncio.wrap_future(listening)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join)

    def _run(self, listening: concurrent.futures.Future[int]) -> None:
        def loop() -> asyncio.AbstractEventLoop:
            return asyncio.SelectorEventLoop(selectors.SelectSelector())

        try:
            with asyncio.Runner(loop_factory=loop) as runner:
                runner.run(self._serve(listening))
        except Exception as error:
            if listening.done():
                raise
            listening.set_exception(error)

    async def _serve(self, listening: concurrent.futures.Future[int]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await self._loop.create_server(lambda: _Side(self, None), "127.0.0.1", self.port)
        listening.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()
        for transport in list(self.transports):
            transport.abort()
        await asyncio.sleep(0)  # each is told of its end


class _Side(asyncio.Protocol):
    """One end of a connection through the proxy: the client's, which then connects the upstream's."""

    def __init__(self, proxy: DelayProxy, peer: _Side | None) -> None:
        self._proxy = proxy
        self._peer = peer
        self._is_upstream = peer is not None
        self._ended = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._proxy.transports.add(transport)
        self._line = Line(
            _SharpClock(asyncio.get_running_loop()),
            lambda: self._proxy.down if self._is_upstream else self._proxy.up,
            self._proxy.draw,
            self._arrive,
        )
        if self._peer is None:
            transport.pause_reading()
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        host, _, port = self._proxy.upstream.rpartition(":")
        try:
            loop = asyncio.get_running_loop()
            _, self._peer = await loop.create_connection(lambda: _Side(self._proxy, self), host, int(port))
        except (OSError, ValueError):
            self._transport.abort()
            return
        if self._transport.is_closing():
            self._peer._transport.abort()
        else:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._line.push(data)

    def eof_received(self) -> bool:
        self._line.push(None)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._proxy.transports.discard(self._transport)
        if self._peer is not None:
            self._line.push(None)

    def _arrive(self, piece: bytes | None) -> None:
        """What this side said has come to the other one."""
        assert self._peer is not None
        other = self._peer._transport
        if piece is not None:
            if not other.is_closing():
                other.write(piece)
            return
        self._ended = True
        if self._peer._ended or self._transport.is_closing():
            self._transport.close()
            other.close()
        elif not other.is_closing():
            other.write_eof()


def _leg(arguments: argparse.Namespace, prefix: str) -> Leg:
    """A direction's own flags, or else those of both."""

    def value(name: str) -> float:
        own: float | None = getattr(arguments, f"{prefix}_{name}")
        both: float = getattr(arguments, name)
        return both if own is None else own

    return Leg(value("delay_ms"), value("jitter_ms"), value("bytes_per_s"))


async def _run(proxy: DelayProxy) -> None:
    async with proxy:
        print(f"{proxy.address} passes on to {proxy.upstream}: up {proxy.up}, down {proxy.down}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", type=int, help="port to listen on; 0 takes a free one")
    parser.add_argument("upstream", help="host:port to pass on to")
    for prefix in ("", "up-", "down-"):
        where = {"": "in both directions", "up-": "towards upstream", "down-": "back"}[prefix]
        for name, what in (
            ("delay-ms", "delay"),
            ("jitter-ms", "most delay beyond that"),
            ("bytes-per-s", "bandwidth"),
        ):
            default = None if prefix else 0.0
            parser.add_argument(f"--{prefix}{name}", type=float, default=default, help=f"{what} {where}")
    arguments = parser.parse_args()
    up, down = _leg(arguments, "up"), _leg(arguments, "down")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(DelayProxy(arguments.upstream, up=up, down=down, port=arguments.port)))


if __name__ == "__main__":
    main()
