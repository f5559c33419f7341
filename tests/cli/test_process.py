"""ServerProcess with small servers of the test's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from splitspec.cli import process as process_module
from splitspec.cli.process import ServerProcess
from splitspec.cli.stack import Stack
from splitspec.errors import ConfigError, SplitspecError
from splitspec.process import waiting_for

Make = Callable[[str], ServerProcess]

SERVER = """
import asyncio, sys
from splitspec.config import ServerSettings
from splitspec.process import run_process, serve_until_signal
from splitspec.serving import Server

async def main(settings):
    async with Server(settings, ["test.Service"], lambda server: None) as server:
        await serve_until_signal(server, settings)

run_process(ServerSettings, main)
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(source: str) -> ServerProcess:
        (tmp_path / "little.py").write_text(source)
        return ServerProcess("little server", "little", "test.Service", [], tmp_path)

    return make


async def test_start_restart_stop(make: Make) -> None:
    server = make(SERVER)
    await server.start()
    address, pid = server.address, server.pid
    assert server.running
    await server.restart()
    assert (server.address, server.running) == (address, True)
    assert server.pid != pid
    await server.stop()
    assert (server.running, server.exit_code) == (False, 0)
    await server.stop()


async def test_kill(make: Make) -> None:
    server = make(SERVER)
    await server.start()
    await server.kill()
    assert server.exit_code == -9
    await server.start()
    await server.stop()
    assert server.exit_code == 0


async def test_its_own_sentence_is_passed_on(make: Make) -> None:
    server = make(SERVER)
    server.arguments = ["--log-level", "loud"]
    with pytest.raises(ConfigError, match=r"^the little server can't start: --log-level .*'loud'") as caught:
        await server.start()
    assert "\n" not in str(caught.value)


async def test_a_crash_shows_the_end_of_the_log(make: Make, tmp_path: Path) -> None:
    server = make("import sys\nfor i in range(100): print(f'line {i}')\nsys.exit(3)")
    with pytest.raises(SplitspecError) as caught:
        await server.start()
    first, *tail = str(caught.value).splitlines()
    assert first == f"the little server ended with exit code 3; {tmp_path / 'little.log'} ends with:"
    assert tail[-1] == "  line 99"
    assert len(tail) < 20


async def test_one_that_does_not_stop_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal = lambda *_: None\n"
    server = make(
        deaf
        + SERVER.replace("serve_until_signal", "serve_for_ever")
        .replace(
            "async def main",
            "async def serve_for_ever(server, settings):\n"
            "    open(settings.port_file, 'w').write(server.address)\n"
            "    await server.set_ready()\n"
            "    await asyncio.sleep(600)\n\n"
            "async def main",
        )
        .replace("import run_process, serve_for_ever", "import run_process")
    )
    monkeypatch.setattr(process_module, "_STOP_LIMIT_S", 0.2)
    await server.start()
    await server.stop()
    assert server.exit_code == -9


async def test_it_never_started(tmp_path: Path) -> None:
    server = ServerProcess("little server", "little", "test.Service", [], tmp_path)
    assert (server.running, server.exit_code) == (False, None)
    await server.stop()
    await server.kill()
    with pytest.raises(RuntimeError, match="never started"):
        _ = server.pid


async def test_a_start_that_makes_no_progress_says_what_it_waits_for(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitspec.cli.stack._TELL_S", 0.05)
    told: asyncio.Queue[str] = asyncio.Queue()
    stack = Stack(model="m", progress=lambda step, detail, done: told.put_nowait(f"{step}: {detail}"))
    stack.redis_url, stack.log_dir = "redis://127.0.0.1:1", tmp_path
    stack._make_processes()
    stack.target = make(
        "import pathlib, time\n"
        "print('waiting for the moon', flush=True)\n"
        f"while not pathlib.Path({str(tmp_path / 'moon')!r}).exists(): time.sleep(0.01)\n" + SERVER
    )
    starting = asyncio.create_task(stack._start(stack.target))
    assert await told.get() == "little server: loading m"
    while not (line := await told.get()).endswith("ends with: waiting for the moon"):
        pass
    assert line.startswith("little server: loading m, for ")
    (tmp_path / "moon").touch()
    await starting
    await stack.target.stop()


def test_a_wait_is_logged_until_it_is_over() -> None:
    with capture_logs() as logged:
        with waiting_for("the moon", every_s=0.01):
            while len(logged) < 3:
                time.sleep(0.01)
        count = len(logged)
    assert [entry["event"] for entry in logged[:3]] == ["waiting", "still waiting", "still waiting"]
    assert {entry["waiting_for"] for entry in logged} == {"the moon"}
    assert len(logged) == count
