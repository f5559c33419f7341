"""A draft worker that is slow, dead or absent, and clients that leave: real processes, real model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, GenerateOptions
from splitspec.errors import UnavailableError
from splitspec.registry import Registry
from splitspec.types import Origin
from tests.integration.conftest import loads, settle_empty, target_load, tiny_stack
from tests.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PROMPT = "Tell me about the history of sailing ships."


async def plain(stack: Stack, max_tokens: int) -> list[int]:
    async with AsyncClient(stack.address) as client:
        result = await client.generate(
            PROMPT, temperature=0, max_tokens=max_tokens, ignore_eos=True, speculate=False
        ).result()
        return result.token_ids


@pytest_asyncio.fixture(loop_scope="session")
async def own_stack(tiny_model: Path) -> AsyncIterator[Stack]:
    """A stack of its own, with a drafter that is always right, whose worker is waited for a second."""
    async with tiny_stack(tiny_model, coordinator=("--draft-timeout-s", "1")) as running:
        yield running


async def test_killed_draft_worker_changes_no_text(own_stack: Stack) -> None:
    expected = await plain(own_stack, 300)
    origins: list[Origin] = []
    ids: list[int] = []
    async with AsyncClient(own_stack.address) as client:
        generation = client.generate(PROMPT, temperature=0, max_tokens=300, ignore_eos=True)
        killed_after = None
        async for chunk in generation:
            origins += [token.origin for token in chunk.tokens]
            ids += [token.id for token in chunk.tokens]
            if killed_after is None and Origin.ACCEPTED in origins:
                await own_stack.draft.kill()
                killed_after = len(ids)
    assert killed_after is not None
    assert killed_after < 300
    assert ids == expected
    assert Origin.PLAIN in origins[killed_after:]
    acceptance = generation.finished.acceptance
    assert acceptance.num_accepted_draft_tokens > 0
    assert acceptance.num_plain_steps > 0

    # And with no draft worker at all the next request decodes plainly, also once its lease is over.
    registry = await Registry.connect(own_stack.redis_url)

    async def forgotten() -> bool:
        return await registry.workers("draft") == []

    async with AsyncClient(own_stack.address) as client:
        for _ in range(2):
            result = await client.generate(PROMPT, temperature=0, max_tokens=10, ignore_eos=True).result()
            assert result.token_ids == expected[:10]
            assert result.finished.acceptance.num_spec_steps == 0
            await until(forgotten)
    await registry.close()


async def test_hung_draft_worker_costs_its_patience_and_no_text(own_stack: Stack) -> None:
    expected = await plain(own_stack, 30)
    async with AsyncClient(own_stack.address) as client:
        generation = client.generate(PROMPT, temperature=0, max_tokens=30, ignore_eos=True)
        ids: list[int] = []
        stopped = False
        try:
            async for chunk in generation:
                ids += [token.id for token in chunk.tokens]
                if not stopped:
                    os.kill(own_stack.draft.pid, signal.SIGSTOP)
                    stopped = True
        finally:
            os.kill(own_stack.draft.pid, signal.SIGCONT)
        assert ids == expected
        assert generation.finished.acceptance.num_draft_missed_steps > 0
        # It drafts again for the next request.
        result = await client.generate(PROMPT, temperature=0, max_tokens=30, ignore_eos=True).result()
        assert result.token_ids == expected


async def test_cancelled_call_frees_both_workers(stack: Stack) -> None:
    await settle_empty(stack)
    async with AsyncClient(stack.address) as client:
        generation = client.generate(
            PROMPT, temperature=0, max_tokens=2000, ignore_eos=True, drafter="layer_skip"
        )
        while (chunk := await generation.read()) is not None and chunk.offset < 5:
            pass
        held = await loads(stack)
        assert all(load.live_sessions == 1 and load.kv_tokens > 0 and load.kv_bytes > 0 for load in held)
        await generation.aclose()

        async def freed() -> bool:
            now = await loads(stack)
            return all((w.live_sessions, w.handles, w.kv_tokens, w.kv_bytes) == (0, 0, 0, 0) for w in now)

        await until(freed)


async def test_expired_call_frees_both_workers(stack: Stack) -> None:
    async with AsyncClient(stack.address) as client:
        with pytest.raises(UnavailableError, match="deadline of 2 s"):
            await client.generate(PROMPT, max_tokens=2000, ignore_eos=True, timeout=2).result()

        async def freed() -> bool:
            return all(load.handles == 0 for load in await loads(stack))

        await until(freed)


async def test_cancel_while_a_long_prompt_is_fed(stack: Stack) -> None:
    prompt = [1000 + i % 500 for i in range(6000)]
    async with AsyncClient(stack.address) as client:
        generation = client.generate(prompt, max_tokens=5, speculate=False)
        reading = asyncio.create_task(generation.result())

        async def feeding() -> bool:
            return (await target_load(stack)).kv_tokens > 0

        await until(feeding)
        reading.cancel()

        async def freed() -> bool:
            return (await target_load(stack)).handles == 0

        # At most the pass over one chunk of the prompt is finished first.
        await until(freed)


async def test_session_keeps_its_kv_until_it_is_closed(stack: Stack) -> None:
    prompt = list(range(100, 130))
    options: GenerateOptions = {
        "session_id": "kept",
        "temperature": 0.0,
        "max_tokens": 8,
        "ignore_eos": True,
        "drafter": "model",
    }
    async with AsyncClient(stack.address) as client:
        first = await client.generate(prompt, **options).result()
        held = await loads(stack)
        assert [(load.live_sessions, load.handles) for load in held] == [(0, 1), (0, 1)]
        second = await client.generate([300, 301], **options).result()
        assert second.started.prompt_tokens == 30 + 8 + 2
        # Only the last committed token of the first request and the new ones were fed.
        assert second.started.cached_tokens >= 30 + 7
        whole = [*prompt, *first.token_ids, 300, 301]
        fresh = await client.generate(
            whole, temperature=0, max_tokens=8, ignore_eos=True, speculate=False
        ).result()
        assert second.token_ids == fresh.token_ids
        assert await client.close_session("kept")
        assert not await client.close_session("kept")
        assert [load.handles for load in await loads(stack)] == [0, 0]
