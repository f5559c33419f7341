"""Pools too small for all sessions: idle ones give way and come back, running ones wait, then are told.

What could never fit is refused at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from protos.v1 import common_pb2, target_pb2, target_pb2_grpc
from splitspec.cli.process import ServerProcess
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, GenerateOptions, Result
from splitspec.engine.paged import BLOCK_SIZE
from splitspec.errors import InvalidRequestError, OverloadedError
from splitspec.tokens import TokenLog
from splitspec.types import FinishReason
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
    turns = [text(1, 450), text(2, 30), text(3, 30)]

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
        await client.generate(text(4, 550), **other).result()
        after = [await target_load(small), await draft_load(small)]
        results.append(await talk(client, 2))
        assert await client.close_session("idle")
        assert await client.close_session("other")
    for held, left in zip(before, after, strict=True):
        assert room(held) < held.kv_tokens + 550
        # Both sessions have their handles, and only the other one its KV.
        assert (held.handles, left.handles) == (1, 2)
        assert held.kv_tokens > 450
        assert 550 <= left.kv_tokens <= 570
    assert [result.token_ids for result in results] == [result.token_ids for result in undisturbed]
    cached, kept = ([each.started.cached_tokens for each in every] for every in (results, undisturbed))
    assert kept == [0, 450 + 19, 450 + 20 + 30 + 19]
    # Of the evicted text only what nobody needed the room of is found again.
    assert cached[:2] == kept[:2]
    assert cached[2] <= room(after[0]) - 550
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


async def limit(client: AsyncClient) -> int:
    return (await client.describe()).limits.max_context


async def test_what_can_never_fit_is_refused_by_the_limit_that_is_told(small: Stack) -> None:
    async with AsyncClient(small.address) as client:
        most = await limit(client)
        assert most < room(await target_load(small)) < 1000
        expected = (
            rf"prompt is '{most} tokens', expected at most {most - 1}, as the target worker's KV "
            rf"\(its kv_memory_mib\) has room for {most} tokens"
        )
        with pytest.raises(InvalidRequestError, match=expected):
            await client.generate(text(9, most), **OPTIONS).result()
        options: GenerateOptions = {**OPTIONS, "session_id": "grows"}
        first = await client.generate(text(9, most - 100), **options).result()
        with pytest.raises(InvalidRequestError, match=f"'{most - 100 + 20 + 90} tokens'"):
            await client.generate(text(10, 90), **options).result()
        assert len((await client.generate(text(10, 30), **options).result()).tokens) == 20
        assert await client.close_session("grows")
        # What is longer with its output ends where the room ends.
        whole = [*text(9, most - 100), *first.token_ids]
        cut = await client.generate(whole, temperature=0, ignore_eos=True).result()
        assert (cut.finished.reason, len(cut.tokens)) == (FinishReason.CONTEXT_LIMIT, most - len(whole))
        assert cut.finished.acceptance.num_accepted_draft_tokens > 10
    await settle_empty(small)


async def test_a_request_goes_where_it_fits(small: Stack, tiny: Stack, tmp_path: Path) -> None:
    """To the target worker whose KV has room for all of it; without drafts where theirs has none."""
    arguments = [f"--model={small._model}", "--dtype=float32", f"--redis-url={small.redis_url}"]
    service = target_pb2.DESCRIPTOR.services_by_name["TargetWorkerService"].full_name
    large = ServerProcess(
        "large target worker", "target_worker", service, [*arguments, "--kv-memory-mib=4"], tmp_path
    )
    turns = [text(11, 300), text(12, 400)]

    async def talk(client: AsyncClient) -> list[Result]:
        options: GenerateOptions = {**OPTIONS, "session_id": "moves"}
        results = [await client.generate(turn, **options).result() for turn in turns]
        assert await client.close_session("moves")
        return results

    async with AsyncClient(small.address) as client, AsyncClient(tiny.address) as roomy:
        least = await limit(client)
        await large.start()
        try:

            async def joined() -> bool:
                return await limit(client) > least

            await until(joined)
            assert await limit(client) > 1500
            long = await client.generate(text(13, 1500), **OPTIONS).result()
            moved = await talk(client)
        finally:
            await large.stop()
        expected = await roomy.generate(text(13, 1500), **OPTIONS).result()
        assert long.token_ids == expected.token_ids
        # The draft worker's pool can't hold it: nothing is drafted, and nothing waits for that.
        assert long.finished.acceptance.num_draft_tokens == 0
        assert expected.finished.acceptance.num_draft_tokens > 0
        undisturbed = await talk(roomy)
        assert [result.token_ids for result in moved] == [result.token_ids for result in undisturbed]
        assert await limit(client) == least
        with pytest.raises(InvalidRequestError, match=f"expected at most {least - 1}"):
            await client.generate(text(13, 1500), **OPTIONS).result()
