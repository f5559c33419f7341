"""One of our servers as a child process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from splitspec.cli.health import health_status
from splitspec.errors import ConfigError, SplitspecError, UnavailableError
from splitspec.registry import die_with_parent

#: Seconds that running streams get when a process is told to stop.
GRACE_S = 5.0
_STOP_LIMIT_S = GRACE_S + 10.0
_POLL_S = 0.02
_TAIL_LINES = 12


@dataclass(eq=False)
class ServerProcess:
    """A server that dies with this process, however that ends. Linux only.

    name: for people. module: run as `python -m`. service: full name of its gRPC service.
    directory: where its log goes. port: 0 takes a free one, which stays the same when it is restarted.
    launcher: what runs the module in place of `python -m`, as arguments of Python; torchrun, for example.
    """

    name: str
    module: str
    service: str
    arguments: Sequence[str]
    directory: Path
    port: int = 0
    launcher: Sequence[str] = ("-m",)
    address: str = field(default="", init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _not_ready: str = field(default="", init=False)

    @property
    def log_path(self) -> Path:
        return self.directory / f"{self.module}.log"

    @property
    def pid(self) -> int:
        """Raises RuntimeError when it was never started."""
        if self._process is None:
            raise RuntimeError(f"the {self.name} was never started")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None before it has ended; negative for the signal that ended it."""
        return self._process.poll() if self._process else None

    @property
    def waits_for(self) -> str:
        """Why it isn't ready, as far as can be seen from outside."""
        if self._not_ready:
            return self._not_ready
        lines = self.log_path.read_text(errors="replace").splitlines()
        return f"{self.log_path} ends with: {lines[-1]}" if lines else "it has logged nothing"

    @property
    def running(self) -> bool:
        return self._process is not None and self.exit_code is None

    async def start(self) -> None:
        """Return once it is ready. Raises ConfigError or SplitspecError with its last words when it ends."""
        self._port_file.unlink(missing_ok=True)
        self._spawn()
        while not await self._ready():
            if not self.running:
                raise self.failure()
            await asyncio.sleep(_POLL_S)
        self.port = int(self.address.rpartition(":")[2])

    async def stop(self) -> None:
        """End it gracefully, or by force when that takes too long; fine when it doesn't run."""
        if not self.running:
            return
        os.kill(self.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                await self._wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End it by SIGKILL; fine when it doesn't run."""
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
            await self._wait()

    async def restart(self) -> None:
        """Stop it and start it again at the same address."""
        await self.stop()
        await self.start()

    def failure(self) -> SplitspecError:
        """Why it ended: its own sentence when it said one, else the end of its log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        if self.exit_code == 2 and lines and lines[-1].startswith("error: "):
            return ConfigError(f"the {self.name} can't start: {lines[-1].removeprefix('error: ')}")
        tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  (nothing)"
        return SplitspecError(
            f"the {self.name} ended with exit code {self.exit_code}; {self.log_path} ends with:\n{tail}"
        )

    @property
    def _port_file(self) -> Path:
        return self.directory / f"{self.module}.address"

    def _spawn(self) -> None:
        server = [sys.executable, "-P", *self.launcher, self.module, "--host", "127.0.0.1"]
        server += ["--port", str(self.port)]
        server += ["--port-file", str(self._port_file), "--shutdown-grace-s", str(GRACE_S), *self.arguments]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *server],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # The terminal's Ctrl-C is for the parent, which then stops its children in order.
                start_new_session=True,
            )

    async def _ready(self) -> bool:
        """It listens and says that it serves."""
        self._not_ready = ""
        try:
            self.address = self._port_file.read_text()
            return await health_status(self.address, self.service) == "SERVING"
        except FileNotFoundError:
            return False
        except UnavailableError as error:
            self._not_ready = str(error)
            return False

    async def _wait(self) -> None:
        while self.running:  # noqa: ASYNC110  # a process of any event loop, or of none, has no event
            await asyncio.sleep(_POLL_S)
