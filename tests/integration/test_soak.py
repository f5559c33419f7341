"""Many requests of all kinds and modes, some cancelled: at the end processes hold what they held before."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from splitspec.cli.process import ServerProcess
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, GenerateOptions, Mode
from splitspec.errors import SessionBusyError
from tests.integration.conftest import loads, tiny_stack
from tests.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]

AT_ONCE = 8
#: What a process may hold more at the end: the heap has holes. A row of logits kept for each request would be
#: six times as much in the long form.
MOST_GROWTH_MIB = 64
#: Few enough products are kept that the requests which aren't counted make them all.
KEPT_PRODUCTS = "64"


@pytest_asyncio.fixture(loop_scope="session")
async def small(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    """A stack whose pools are full after a few requests, so that blocks are evicted all the time."""
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.setenv(cache, KEPT_PRODUCTS)
    # A worker that a busy machine holds up for a while stays in the directory.
    flags = ("--kv-memory-mib=4", "--directory-lease-s=60")
    async with tiny_stack(tiny_model, target=flags, draft=flags) as stack:
        yield stack


async def one(client: AsyncClient, seed: int) -> None:
    """A request by chance, which may be left at any time, and its session's end."""
    chance = random.Random(seed)
    shared = [5000 + i for i in range(chance.choice([0, 0, 64, 130]))]
    prompt = shared + [chance.randrange(100, 40000) for _ in range(int(10 ** chance.uniform(0, 2.3)))]
    session_id = chance.choice(["", f"soak-{seed}"])
    drafter = chance.choice(["model", "lookup"])
    modes = [mode for mode in Mode if drafter == "model" or mode is not Mode.PIPELINED]
    options: GenerateOptions = {
        "temperature": chance.choice([0.0, 0.9]),
        "ignore_eos": True,
        "max_tokens": chance.randint(1, 40),
        "num_draft_tokens": chance.choice([0, 1, 3, 8]),
        "drafter": drafter,
        "mode": chance.choice(modes),
        "session_id": session_id,
    }
    if chance.random() < 0.3:
        reading = asyncio.create_task(client.generate(prompt, **options).result())
        await asyncio.wait({reading}, timeout=chance.uniform(0, 0.3))
        reading.cancel()
        await asyncio.wait({reading})
    else:
        result = await client.generate(prompt, **options).result()
        assert len(result.tokens) == options["max_tokens"]
    if session_id:
        await close(client, session_id)


async def close(client: AsyncClient, session_id: str) -> None:
    async def closed() -> bool:
        try:
            await client.close_session(session_id)
        except SessionBusyError:  # the cancelled request is still leaving
            return False
        return True

    await until(closed)


async def many(client: AsyncClient, seeds: range) -> None:
    """Requests, so many at once."""
    waiting = iter(seeds)

    async def some() -> None:
        for seed in waiting:
            await one(client, seed)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(some())


async def settle_unheld(stack: Stack) -> None:
    """Until no worker holds anything for a session."""

    async def unheld() -> bool:
        return all(
            (load.live_sessions, load.handles, load.kv_tokens, load.kv_bytes, load.kv_blocks_used)
            == (0, 0, 0, 0, 0)
            for load in await loads(stack)
        )

    await until(unheld)


def resident_mib(process: ServerProcess) -> float:
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize(
    ("warm_up", "count"), [(60, 150), pytest.param(1000, 2000, marks=pytest.mark.full)], ids=["few", "all"]
)
async def test_requests_leave_nothing(small: Stack, warm_up: int, count: int) -> None:
    """Not counted are the first ones: pools are filled once then, and gRPC starts its threads."""
    processes = [small.target, small.draft, small.coordinator]
    async with AsyncClient(small.address) as client:
        expected = (await client.generate([1, 2, 3], temperature=0, max_tokens=30).result()).token_ids
        rooms = [load.kv_blocks_free + load.kv_blocks_cached for load in await loads(small)]
        await many(client, range(warm_up))
        await settle_unheld(small)
        before = [resident_mib(process) for process in processes]
        await many(client, range(warm_up, warm_up + count))
        await settle_unheld(small)
        grown = [resident_mib(process) - held for process, held in zip(processes, before, strict=True)]
        assert [load.kv_blocks_free + load.kv_blocks_cached for load in await loads(small)] == rooms
        assert (await client.generate([1, 2, 3], temperature=0, max_tokens=30).result()).token_ids == expected
    assert max(grown) < MOST_GROWTH_MIB
