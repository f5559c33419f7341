"""The same client for code without an event loop: each call runs on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from splitspec.client.asynchronous import UNARY_TIMEOUT_S, AsyncClient, AsyncGeneration
from splitspec.client.request import GenerateOptions, Prompt
from splitspec.client.values import Chunk, Description, Finished, Result, Started

T = TypeVar("T")


class Client:
    """AsyncClient as a plain context manager: the same calls and errors, from any thread."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)

    def __enter__(self) -> Self:
        self._thread = _LoopThread()
        self._thread.run(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._client.__aexit__(kind, error, trace))
        self._thread.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """As AsyncClient.generate."""
        return Generation(self._client.generate(prompt, **options), self._thread)

    def close_session(self, session_id: str, *, tenant: str = "", timeout: float = UNARY_TIMEOUT_S) -> bool:
        """As AsyncClient.close_session."""
        return self._thread.run(self._client.close_session(session_id, tenant=tenant, timeout=timeout))

    def describe(self, *, timeout: float = UNARY_TIMEOUT_S) -> Description:
        """As AsyncClient.describe."""
        return self._thread.run(self._client.describe(timeout=timeout))


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
        return self._thread.run(self._generation.read())

    def result(self) -> Result:
        return self._thread.run(self._generation.result())

    def text(self) -> str:
        return self._thread.run(self._generation.text())

    def close(self) -> None:
        if self._thread.running:
            self._thread.run(self._generation.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LoopThread:
    """An event loop that runs in a thread until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_handle)
        self._thread = threading.Thread(target=self._loop.run_forever, name="splitspec-client", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; an interrupt of this thread cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report as usual, but for gRPC's false alarm.

    All loops of a process that use gRPC are woken by one pipe, and each that finds it already empty says so
    as an error.
    """
    if not (
        isinstance(context.get("exception"), BlockingIOError) and "PollerCompletionQueue" in str(context)
    ):
        loop.default_exception_handler(context)
