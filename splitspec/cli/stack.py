"""All processes of one service on this machine: Redis, target worker, draft worker, coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from protos.v1 import coordinator_pb2, draft_pb2, target_pb2
from splitspec.cli.process import ServerProcess
from splitspec.errors import ConfigError, SplitspecError
from splitspec.registry import EmbeddedRedis

_POLL_S = 0.2
#: A start that takes longer says what it waits for.
_TELL_S = 15.0

#: Called with a step's name, what it does or how it ended, and whether it has ended.
Progress = Callable[[str, str, bool], None]


class Stack:
    """Starts everything on loopback and stops it in order, as an async context manager.

    model: hub id, directory or GGUF file. drafters: as the draft worker's --drafters; without any there is
    no draft worker, and everything decodes plainly. *_args: further flags of each process.
    port: the coordinator's; 0 takes a free one. redis_url: a running Redis; None starts one.
    log_dir: where the logs go; None takes a temporary directory that is kept when something fails.

    Entering raises ConfigError or SplitspecError when a process can't start. Nothing survives this
    process, nor the thread that entered. Attributes exist once entered: target, draft, coordinator
    (ServerProcess), redis_url, log_dir.
    """

    target: ServerProcess
    draft: ServerProcess
    coordinator: ServerProcess
    redis_url: str
    log_dir: Path

    def __init__(
        self,
        *,
        model: str | Path,
        drafters: Sequence[str] = ("lookup",),
        dtype: str = "float32",
        target_args: Sequence[str] = (),
        draft_args: Sequence[str] = (),
        coordinator_args: Sequence[str] = (),
        port: int = 0,
        redis_url: str | None = None,
        log_dir: Path | None = None,
        progress: Progress = lambda step, detail, done: None,
    ) -> None:
        self._model = str(model)
        self._drafters = " ".join(drafters)
        self._target_args = [f"--model={model}", f"--dtype={dtype}", *target_args]
        self._draft_args = [f"--drafters={self._drafters}", f"--dtype={dtype}", *draft_args]
        self._coordinator_args = [f"--model={model}", *coordinator_args]
        self._port = port
        self._given_redis_url = redis_url
        self._given_log_dir = log_dir
        self.progress = progress

    @property
    def address(self) -> str:
        """The coordinator's host:port."""
        return self.coordinator.address

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as undo:
            self.log_dir = self._make_log_dir(undo)
            self.redis_url = self._given_redis_url or self._start_redis(undo)
            self._make_processes()
            for process in self._processes:
                undo.push_async_callback(process.stop)
            await self._start_processes()
            self._undo = undo.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._undo.__aexit__(kind, error, trace)

    async def failed(self) -> SplitspecError:
        """Wait until a process ends by itself, and say why it did."""
        while True:
            for process in self._processes:
                if process.exit_code is not None:
                    return process.failure()
            await asyncio.sleep(_POLL_S)

    @property
    def _processes(self) -> list[ServerProcess]:
        """Those that run, in the order of their start; they are stopped the other way round."""
        return [self.target, *([self.draft] if self._drafters else []), self.coordinator]

    def _make_log_dir(self, undo: contextlib.AsyncExitStack) -> Path:
        if self._given_log_dir is not None:
            try:
                self._given_log_dir.mkdir(parents=True, exist_ok=True)
                (self._given_log_dir / "target_worker.log").open("ab").close()
            except OSError as error:
                given = str(self._given_log_dir)
                raise ConfigError(
                    f"--log-dir is {given!r}: {error.strerror}, expected a directory to write to"
                ) from error
            return self._given_log_dir
        directory = Path(tempfile.mkdtemp(prefix="splitspec-"))

        def remove(kind: object, error: BaseException | None, trace: object) -> None:
            # An interrupt is no failure, and a ConfigError says everything itself.
            if isinstance(error, ConfigError) or not isinstance(error, Exception):
                shutil.rmtree(directory, ignore_errors=True)

        undo.push(remove)
        return directory

    def _start_redis(self, undo: contextlib.AsyncExitStack) -> str:
        # In this very thread, since the server dies with the one that starts it.
        redis = undo.enter_context(EmbeddedRedis())
        self.progress("Redis", redis.url, True)
        return redis.url

    def _make_processes(self) -> None:
        redis = f"--redis-url={self.redis_url}"
        self.target = ServerProcess(
            "target worker",
            "target_worker",
            target_pb2.DESCRIPTOR.services_by_name["TargetWorkerService"].full_name,
            [*self._target_args, redis],
            self.log_dir,
        )
        self.draft = ServerProcess(
            "draft worker",
            "draft_worker",
            draft_pb2.DESCRIPTOR.services_by_name["DraftWorkerService"].full_name,
            [*self._draft_args, redis],
            self.log_dir,
        )
        self.coordinator = ServerProcess(
            "coordinator",
            "coordinator",
            coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name,
            [*self._coordinator_args, redis],
            self.log_dir,
            self._port,
        )

    async def _start_processes(self) -> None:
        """All at once; the first one that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for process in self._processes:
                    group.create_task(self._start(process))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _start(self, process: ServerProcess) -> None:
        self.progress(process.name, self._activity(process), False)
        begun = time.monotonic()
        telling = asyncio.create_task(self._tell(process, begun))
        try:
            await process.start()
        finally:
            telling.cancel()
        self.progress(process.name, f"{process.address}, after {time.monotonic() - begun:.1f} s", True)

    async def _tell(self, process: ServerProcess, begun: float) -> None:
        """Say from time to time what a start waits for."""
        while True:
            await asyncio.sleep(_TELL_S)
            waited = f"{self._activity(process)}, for {time.monotonic() - begun:.0f} s by now"
            self.progress(process.name, f"{waited}; {process.waits_for}", False)

    def _activity(self, process: ServerProcess) -> str:
        if process is self.coordinator:
            return "reading the tokenizer"
        if process is self.target:
            return f"loading {Path(self._model).name}"
        kinds = [drafter.split("=")[0].split(",")[0] for drafter in self._drafters.split()]
        return f"loading {', '.join(kinds)}"
