"""The real processes, started and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisAway

from splitspec.cli.health import health_status
from splitspec.cli.process import ServerProcess
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient
from splitspec.errors import ConfigError, UnavailableError

pytestmark = pytest.mark.model

PARENT = """
import asyncio, sys
from splitspec.cli.stack import Stack

async def main():
    async with Stack(model=sys.argv[1]) as stack:
        print(stack.target.pid, stack.draft.pid, stack.coordinator.pid, stack.log_dir, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_everything_starts_and_nothing_is_left(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[tuple[str, object]] = []
    stop = ServerProcess.stop

    async def recorded(process: ServerProcess) -> None:
        with Redis.from_url(stack.redis_url) as redis:
            stopped.append((process.name, redis.ping()))
        await stop(process)

    monkeypatch.setattr(ServerProcess, "stop", recorded)
    steps: list[tuple[str, bool]] = []
    stack = Stack(
        model=demo_model,
        log_dir=tmp_path / "logs",
        progress=lambda step, detail, done: steps.append((step, done)),
    )
    async with stack, AsyncClient(stack.address) as client:
        assert (await client.describe()).drafters == ("lookup",)
        assert (await client.generate("One two", temperature=0, max_tokens=3).result()).token_ids
        await stack.draft.kill()
        assert (await client.generate("One two", temperature=0, max_tokens=3).result()).token_ids
        await stack.draft.restart()
        assert await health_status(stack.draft.address) == "SERVING"
        stopped.clear()
    assert stopped == [("coordinator", True), ("draft worker", True), ("target worker", True)]
    processes = (stack.target, stack.draft, stack.coordinator)
    assert [process.exit_code for process in processes] == [0, 0, 0]
    with Redis.from_url(stack.redis_url) as redis, pytest.raises(RedisAway):
        redis.ping()
    with pytest.raises(UnavailableError):
        await health_status(stack.address)
    assert sorted(name for name, done in steps if done) == [
        "Redis",
        "coordinator",
        "draft worker",
        "target worker",
    ]
    assert steps[0] == ("Redis", True)
    assert all(process.log_path.parent == tmp_path / "logs" for process in processes)


async def test_one_that_fails_stops_the_others(demo_model: Path, tmp_path: Path) -> None:
    stack = Stack(model=demo_model, drafters=["nonsense"], log_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"the draft worker can't start: .*nonsense"):
        async with stack:
            pass
    assert [stack.target.running, stack.coordinator.running] == [False, False]
    with Redis.from_url(stack.redis_url) as redis, pytest.raises(RedisAway):
        redis.ping()


async def test_a_given_redis_is_used_and_left_alone(demo_model: Path, tmp_path: Path, redis_url: str) -> None:
    stack = Stack(model=demo_model, drafters=[], redis_url=redis_url, log_dir=tmp_path)
    async with stack, AsyncClient(stack.address) as client:
        description = await client.describe()
        assert description.drafters == ()
        await stack.target.kill()
        assert "exit code -9" in str(await stack.failed())
    with Redis.from_url(redis_url) as redis:
        assert redis.ping()


def test_all_die_with_a_parent_that_is_killed(demo_model: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, demo_model],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as parent:
        assert parent.stdout is not None
        *pids, log_dir = parent.stdout.readline().split()
        assert Path(log_dir).parent == tmp_path
        assert all(alive(int(pid)) for pid in pids)
        parent.send_signal(signal.SIGKILL)
    while any(alive(int(pid)) for pid in pids):  # if one survives, the test's time runs out
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """The process runs: an orphan that nobody reaps has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
