"""Clients as programs use them: from threads, over forks, closed early, left alone."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from protos.v1 import coordinator_pb2
from splitspec import errors
from splitspec.client import AsyncClient, AsyncGeneration, Client
from splitspec.errors import SessionBusyError, UnavailableError
from tests.client.scripted import Script, serving, whole
from tests.client.test_client import waits


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


Events = Iterator[coordinator_pb2.GenerateResponse]


class Busy:
    """The first call waits; of the others so many are refused because the session is busy."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.calls = 0

    def __call__(self, context: grpc.ServicerContext) -> Events:
        self.calls += 1
        if self.calls == 1:
            yield from waits(context)
        elif self.calls <= 1 + self.times:
            raise SessionBusyError("another request runs", retry_after_s=0.01)
        else:
            yield from whole()


@pytest.mark.parametrize("ids", [{"session_id": "s"}, {"request_id": "r"}])
async def test_a_session_that_was_left_is_waited_for(
    address: str, script: Script, ids: dict[str, Any]
) -> None:
    script.answer = busy = Busy(3)
    async with AsyncClient(address) as client:
        async for _ in client.generate("Hi", **ids):
            break
        assert (await client.generate("Hi", **ids).result()).text == "Grüße"
    assert busy.calls == 5


async def test_and_by_another_client_of_the_process(address: str, script: Script) -> None:
    script.answer = busy = Busy(1)
    with pytest.raises(UnavailableError, match="deadline"):
        async with AsyncClient(address) as client:
            await client.generate("Hi", session_id="s", timeout=0.2).result()
    async with AsyncClient(address) as client:
        assert (await client.generate("Hi", session_id="s").result()).text == "Grüße"
    assert busy.calls == 3


@pytest.mark.parametrize("options", [{"session_id": "another"}, {"session_id": "s", "tenant": "another"}])
async def test_other_sessions_are_not_waited_for(
    address: str, script: Script, options: dict[str, Any]
) -> None:
    script.answer = busy = Busy(9)
    async with AsyncClient(address) as client:
        async for _ in client.generate("Hi", session_id="s"):
            break
        with pytest.raises(SessionBusyError):
            await client.generate("Hi", **options).result()
        with pytest.raises((SessionBusyError, UnavailableError)):  # no longer than the deadline
            await client.generate("Hi", session_id="s", timeout=0.02).result()
    assert 2 <= busy.calls <= 9


async def test_a_generation_that_is_dropped_is_cancelled(address: str, script: Script) -> None:
    script.answer = waits
    async with AsyncClient(address) as client:
        await client.generate("Hi").read()
    assert await asyncio.to_thread(script.ended.wait, 10)


def test_a_generation_that_the_collector_finds_is_cancelled(address: str, script: Script) -> None:
    """In whatever thread it runs: the loop's own, for example, which nobody may wait for there."""
    script.answer = waits
    with Client(address) as client:
        chunks = iter(client.generate("Hi"))
        next(chunks)
        cycle: list[object] = [chunks]
        cycle.append(cycle)
        del cycle, chunks

        async def collect() -> None:
            gc.collect()

        assert client._loop is not None
        client._loop.run(collect())
        assert script.ended.wait(10)


async def test_the_consumer_s_error_ends_the_call(address: str, script: Script) -> None:
    script.answer = waits
    async with AsyncClient(address) as client:
        generation = client.generate("Hi")
        with pytest.raises(KeyError):
            await fails(generation)
        assert await asyncio.to_thread(script.ended.wait, 10)


async def fails(generation: AsyncGeneration) -> None:
    async for _ in generation:
        raise KeyError


async def test_a_client_closed_during_a_stream(address: str, script: Script) -> None:
    script.answer = waits
    client = await AsyncClient(address).__aenter__()
    generation = client.generate("Hi")
    await generation.read()
    reading = asyncio.create_task(generation.read())
    await asyncio.sleep(0)
    await client.__aexit__(None, None, None)
    with pytest.raises(RuntimeError, match="the client was closed before this generation had ended"):
        await reading
    with pytest.raises(RuntimeError, match="was closed"):
        await generation.result()


def test_a_client_closed_by_another_thread(address: str, script: Script) -> None:
    script.answer = waits
    client = Client(address).__enter__()
    generation = client.generate("Hi")
    generation.read()
    closing = threading.Thread(target=client.__exit__, args=(None, None, None))
    closing.start()
    with pytest.raises(RuntimeError, match="closed"):
        generation.result()
    closing.join()
    with pytest.raises(RuntimeError, match="closed"):
        generation.read()
    generation.close()


def test_what_was_read_outlives_the_client(address: str) -> None:
    with Client(address) as client:
        generation = client.generate("Hi")
        assert len(list(generation)) == 2
    assert generation.text() == "Grüße"
    assert list(generation) == []


def test_threads_share_a_client_and_a_generation(address: str) -> None:
    texts: list[str] = []
    with Client(address) as client:
        generation = client.generate("Hi")

        def work() -> None:
            texts.append(client.generate("Hi").text())
            while (chunk := generation.read()) is not None:
                texts.append(chunk.text)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(texts) == sorted(["Grüße"] * 4 + ["Grü", "ße"])


def test_a_client_that_is_not_open(address: str) -> None:
    client = Client(address)
    for _ in range(2):  # before it is opened, and when it has been closed
        with pytest.raises(RuntimeError, match="isn't open"):
            client.generate("Hi")
        with pytest.raises(RuntimeError, match="isn't open"):
            client.describe()
        with client, pytest.raises(RuntimeError, match="open already"):
            client.__enter__()


def test_another_event_loop(address: str) -> None:
    async def opened() -> AsyncClient:
        return await AsyncClient(address).__aenter__()

    async def use() -> None:
        with pytest.raises(RuntimeError, match="opened on another event loop"):
            await client.generate("Hi").result()
        with pytest.raises(RuntimeError, match="opened on another event loop"):
            await client.describe()

    client = asyncio.run(opened())
    asyncio.run(use())


def test_a_pickled_client_is_one_of_the_same_address(address: str) -> None:
    with Client(address) as client:
        result = client.generate("Hi").result()
        assert pickle.loads(pickle.dumps(result)) == result
        with pickle.loads(pickle.dumps(client)) as other:
            assert other.generate("Hi").text() == "Grüße"
    error = pickle.loads(pickle.dumps(errors.SessionBusyError("m", "f", 0.5)))
    assert (error.message, error.field, error.retry_after_s) == ("m", "f", 0.5)


def test_a_name_that_does_not_resolve() -> None:
    with Client("nowhere.invalid:1") as client, pytest.raises(UnavailableError, match=r"nowhere\.invalid:1"):
        client.describe()


FORK = """
import asyncio, multiprocessing, os, sys
from splitspec.client import AsyncClient, AsyncGeneration, Client

address, case = sys.argv[1:]

def say():
    with Client(address) as client:
        print(client.generate("Hi").text(), flush=True)

async def say_async():
    async with AsyncClient(address) as client:
        print((await client.generate("Hi").result()).text, flush=True)

def in_child(work):
    try:
        work()
    except RuntimeError as error:
        print(error, flush=True)

def forked(work):
    process = multiprocessing.get_context("fork").Process(target=in_child, args=[work])
    process.start()
    process.join()
    print(process.exitcode, flush=True)

if case == "closed":
    say()
    forked(say)
    forked(lambda: asyncio.run(say_async()))
elif case == "open":
    client = Client(address)
    with client:
        generation = client.generate("Hi")
        generation.read()
        forked(say)
        forked(generation.read)
        forked(lambda: client.generate("Hi").text())
        forked(lambda: client.__exit__(None, None, None))
        print(generation.text())
elif case == "inside":
    with Client(address) as client:
        client.describe()
        pid = os.fork()
        if pid == 0:
            print("child", flush=True)
        else:
            print(os.waitpid(pid, 0)[1], client.generate("Hi").text(), flush=True)
"""
BROKEN = "this process was forked while gRPC ran, which gRPC doesn't survive: expected all clients closed"
INHERITED = "the client was opened before a fork, expected one that this process opens"


@pytest.mark.parametrize(
    ("case", "lines"),
    [
        ("closed", ["Grüße", "Grüße", "0", "Grüße", "0"]),
        ("open", [BROKEN, "0", INHERITED, "0", INHERITED, "0", "0", "Grüße"]),
        ("inside", ["child", "0 Grüße"]),
    ],
)
@pytest.mark.parametrize("support", ["0", "1"])
def test_forks(address: str, case: str, lines: list[str], support: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, address, case],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": support, "GRPC_VERBOSITY": "NONE"},
    )
    said = done.stdout.splitlines()
    assert len(said) == len(lines), done
    assert all(line.startswith(start) for line, start in zip(said, lines, strict=True)), done
    assert done.returncode == 0
