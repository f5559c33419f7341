"""The same client for code without an event loop: each call runs on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from splitspec.client import forks
from splitspec.client.asynchronous import AsyncClient
from splitspec.client.generation import AsyncGeneration
from splitspec.client.request import GenerateOptions, Prompt
from splitspec.client.values import Chunk, Description, Finished, Result, Started

T = TypeVar("T")


class Client:
    """AsyncClient as a plain context manager: the same calls and errors, from any thread."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)
        self._loop: _LoopThread | None = None

    def __enter__(self) -> Self:
        if self._loop is not None:
            raise RuntimeError("the client is open already")
        loop = _LoopThread()
        try:
            loop.run(self._client.__aenter__())
        except BaseException:
            loop.close()
            raise
        self._loop = loop
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop, self._loop = self._thread, None
        if not forks.is_other_process(loop.pid):
            loop.run(self._client.__aexit__(kind, error, trace))
            loop.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._client.__reduce__()[1]

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """As AsyncClient.generate."""
        return Generation(self._client.generate(prompt, **options), self._thread)

    def close_session(
        self, session_id: str, *, tenant: str | None = None, timeout: float | None = None
    ) -> bool:
        """As AsyncClient.close_session."""
        return self._thread.run(self._client.close_session(session_id, tenant=tenant, timeout=timeout))

    def describe(self, *, timeout: float | None = None) -> Description:
        """As AsyncClient.describe."""
        return self._thread.run(self._client.describe(timeout=timeout))

    @property
    def _thread(self) -> _LoopThread:
        if self._loop is None:
            raise RuntimeError("the client isn't open: expected its use within `with`")
        return self._loop


class Generation:
    """AsyncGeneration for plain iteration; `close` may be called from another thread."""

    def __init__(self, generation: AsyncGeneration, thread: _LoopThread) -> None:
        self._generation = generation
        self._thread = thread

    @property
    def started(self) -> Started:
        return self._generation.started

    @property
    def finished(self) -> Finished:
        return self._generation.finished

    def __iter__(self) -> Iterator[Chunk]:
        try:
            while (chunk := self.read()) is not None:
                yield chunk
        finally:
            self.close()

    def read(self) -> Chunk | None:
        return None if self._generation.whole else self._thread.run(self._generation.read())

    def result(self) -> Result:
        while self.read() is not None:
            pass
        return self._generation.collected()

    def text(self) -> str:
        return self.result().text

    def close(self) -> None:
        # Nobody waits: an iteration that the garbage collector ends may be ended in the loop's own thread.
        self._generation.cancel_soon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LoopThread:
    """An event loop that runs in a thread until `close`."""

    def __init__(self) -> None:
        self._started: Future[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = Future()
        self._closing = False
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="splitspec-client", daemon=True
        )
        self._thread.start()
        self._loop, self._stop = self._started.result()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; an interrupt of this thread cancels it. Raises RuntimeError when closed."""
        try:
            future = self._submit(coroutine)
        except BaseException:
            coroutine.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("the client was closed before the call had ended") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, and wait for its end."""
        with self._lock:
            self._closing = True
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        forks.require_process(self.pid)
        with self._lock:
            if self._closing:
                raise RuntimeError("the client is closed")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _serve(self) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(_handle)
        self._started.set_result((loop, stopped.set))
        await stopped.wait()


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report as usual, but for gRPC's false alarm.

    All loops of a process that use gRPC are woken by one pipe, and each that finds it already empty says so
    as an error.
    """
    if not (
        isinstance(context.get("exception"), BlockingIOError) and "PollerCompletionQueue" in str(context)
    ):
        loop.default_exception_handler(context)
