"""Pools too small for all sessions: idle ones give way and come back, running ones wait, then are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from protos.v1 import common_pb2, target_pb2_grpc
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, GenerateOptions, Result
from splitspec.engine.paged import BLOCK_SIZE
from splitspec.errors import OverloadedError
from splitspec.tokens import TokenLog
from tests.integration.conftest import draft_load, settle_empty, target_load, tiny_stack
from tests.integration.raw import Stream
from tests.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

OPTIONS: GenerateOptions = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 20}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(tiny_model: Path) -> AsyncIterator[Stack]:
    room = ("--kv-memory-mib=1",)
    async with tiny_stack(tiny_model, target=room, draft=room) as stack:
        yield stack


def text(seed: int, length: int) -> list[int]:
    return [3000 * seed + i * i % 2003 for i in range(1, length + 1)]


def room(load: common_pb2.WorkerLoad) -> int:
    """Tokens that a worker's pool has room for."""
    return BLOCK_SIZE * (load.kv_blocks_used + load.kv_blocks_cached + load.kv_blocks_free)


async def test_an_idle_session_gives_way_and_comes_back(small: Stack, tiny: Stack) -> None:
    """Its next turn is fed again, on both workers, and says what it would have said."""
    turns = [text(1, 500), text(2, 30), text(3, 30)]

    async def talk(client: AsyncClient, turn: int) -> Result:
        options: GenerateOptions = {**OPTIONS, "session_id": "idle"}
        return await client.generate(turns[turn], **options).result()

    async with AsyncClient(tiny.address) as client:
        undisturbed = [await talk(client, turn) for turn in range(3)]
        assert await client.close_session("idle")
    async with AsyncClient(small.address) as client:
        results = [await talk(client, turn) for turn in range(2)]
        before = [await target_load(small), await draft_load(small)]
        other: GenerateOptions = {**OPTIONS, "session_id": "other"}
        await client.generate(text(4, 600), **other).result()
        after = [await target_load(small), await draft_load(small)]
        results.append(await talk(client, 2))
        assert await client.close_session("idle")
        assert await client.close_session("other")
    for held, left in zip(before, after, strict=True):
        assert room(held) < 500 + 600
        # Both sessions have their handles, and only the other one its KV.
        assert (held.handles, left.handles) == (1, 2)
        assert held.kv_tokens > 500
        assert 600 <= left.kv_tokens <= 620
    assert [result.token_ids for result in results] == [result.token_ids for result in undisturbed]
    cached, kept = ([each.started.cached_tokens for each in every] for every in (results, undisturbed))
    assert kept == [0, 500 + 19, 500 + 20 + 30 + 19]
    # Of the evicted text only what nobody needed the room of is found again.
    assert cached[:2] == kept[:2]
    assert cached[2] <= room(after[0]) - 600
    assert results[2].finished.acceptance.num_accepted_draft_tokens > 10


@contextlib.asynccontextmanager
async def full(stack: Stack) -> AsyncIterator[None]:
    """A stream that keeps all blocks of the target worker but one, and asks for nothing."""
    async with grpc.aio.insecure_channel(stack.target.address) as channel:
        stream = Stream(target_pb2_grpc.TargetWorkerServiceStub(channel), "holding")
        stream.tokens = TokenLog(text(5, room(await target_load(stack)) - 2 * BLOCK_SIZE + 10))
        await stream.open()
        yield
        stream.call.cancel()


async def test_without_room_a_request_waits_for_another_to_end(small: Stack) -> None:
    async with AsyncClient(small.address) as client:
        expected = await client.generate(text(6, 300), **OPTIONS).result()
        await settle_empty(small)
        async with full(small):
            waiting = asyncio.create_task(client.generate(text(6, 300), **OPTIONS).result())

            async def both() -> bool:
                return (await target_load(small)).live_sessions == 2

            await until(both)
            assert not waiting.done()
        assert (await waiting).token_ids == expected.token_ids
    await settle_empty(small)


async def test_a_client_is_told_when_to_come_again(small: Stack) -> None:
    async with AsyncClient(small.address) as client:
        async with full(small):
            with pytest.raises(OverloadedError, match="blocks of KV are needed") as caught:
                await client.generate(text(7, 300), **OPTIONS).result()
            assert caught.value.retry_after_s > 0
            # What fits is served.
            assert len((await client.generate(text(8, 30), **OPTIONS).result()).tokens) == 20
        assert len((await client.generate(text(7, 300), **OPTIONS).result()).tokens) == 20
    await settle_empty(small)
