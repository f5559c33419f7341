"""A client's channel: where it may be used, and what its failures mean."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from grpc_status import rpc_status

from protos.v1 import coordinator_pb2_grpc
from splitspec.client import forks, left
from splitspec.client.left import SessionKey
from splitspec.errors import SplitspecError, UnavailableError, from_rpc_error
from splitspec.serving import channel

T = TypeVar("T")


class Connection:
    """A channel to one coordinator, opened on the running event loop.

    Raises RuntimeError where gRPC doesn't work.
    """

    def __init__(self, address: str) -> None:
        forks.opens(self)
        self.address = address
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._channel = channel(address)
        self.stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()
        # gRPC ends with the last reference to a channel, and a process may be forked again.
        del self._channel, self.stub
        forks.closed(self)

    @property
    def forked(self) -> bool:
        """This is a process that was forked since, where nothing of it may be touched."""
        return forks.is_other_process(self._pid)

    def require_usable(self) -> None:
        """Raises RuntimeError where no call can be made."""
        forks.require_process(self._pid)
        if self.closed:
            raise RuntimeError("the client is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the client was opened on another event loop, expected one client for each")

    def soon(self, callback: Callable[[], None]) -> None:
        """Call it on the event loop: at once from there, later from another thread, never once it is over."""
        if self.forked or self._loop.is_closed():
            return
        if asyncio.events._get_running_loop() is self._loop:
            callback()
        else:
            self._loop.call_soon_threadsafe(callback)

    async def unary(
        self, call: Callable[[float], Awaitable[T]], timeout: float, session: SessionKey | None = None
    ) -> T:
        """The answer of a call, which is made with the seconds that are left. session: that it's about."""
        deadline = time.monotonic() + timeout
        while True:
            self.require_usable()
            try:
                return await call(deadline - time.monotonic())
            except grpc.aio.AioRpcError as error:
                failure = self.failure(error, timeout)
            if session is None or not left.is_being_freed(session, failure, deadline):
                raise failure
            await asyncio.sleep(failure.retry_after_s)

    def failure(self, error: grpc.aio.AioRpcError, timeout: float) -> SplitspecError:
        """The one of our errors that a failed call stands for."""
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnavailableError(
                f"the coordinator at {self.address} didn't finish within the deadline of {timeout:g} s"
            )
        if code is grpc.StatusCode.UNAVAILABLE and rpc_status.from_call(error) is None:
            return UnavailableError(f"the coordinator at {self.address} can't be reached: {details}")
        return from_rpc_error(error) or SplitspecError(
            f"the coordinator at {self.address} failed with {code.name}: {details}"
        )
