"""Redis away, full or restarted while a session goes on: real processes, a tiny random model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis import Redis

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, AsyncGeneration, Chunk, Result
from splitspec.errors import LostTokensError, SessionBusyError, UnavailableError
from splitspec.registry import EmbeddedRedis
from tests.integration.conftest import PATIENT
from tests.registry.servers import full

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PROMPT = list(range(1000, 1040))
TURN = [50, 51]
LEASE_S = 1.0


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """One that comes back with its data."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(redis: EmbeddedRedis, tiny_model: Path) -> AsyncIterator[Stack]:
    async with Stack(
        model=tiny_model,
        drafters=[f"model={tiny_model}"],
        coordinator_args=[*PATIENT, "--session-lease-s", str(LEASE_S)],
        redis_url=redis.url,
    ) as stack:
        yield stack


def ask(client: AsyncClient, session_id: str, prompt: list[int], max_tokens: int) -> AsyncGeneration:
    return client.generate(
        prompt,
        session_id=session_id,
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        num_draft_tokens=1,
    )


async def next_turn(client: AsyncClient, session_id: str) -> Result:
    """What comes once Redis, the worker directory and the session's lease allow it."""
    while True:
        try:
            return await ask(client, session_id, TURN, 2).result()
        except (UnavailableError, SessionBusyError):
            await asyncio.sleep(0.05)


async def lose_sight_of_redis(generation: AsyncGeneration, redis: EmbeddedRedis) -> None:
    """Read the whole answer, of which Redis has only the beginning."""
    await generation.read()
    redis.stop()
    await generation.result()
    assert not generation.finished.durable


async def test_redis_stopped_in_mid_stream(stack: Stack, redis: EmbeddedRedis) -> None:
    async with AsyncClient(stack.address) as client:
        generation = ask(client, "away", PROMPT, 1200)
        chunks: list[Chunk] = []
        stopped = resumed = False
        async for chunk in generation:
            chunks.append(chunk)
            if len(chunks) == 5:
                os.kill(redis.pid, signal.SIGSTOP)
                stopped = True
            if stopped and not chunk.durable:
                os.kill(redis.pid, signal.SIGCONT)
            resumed = resumed or (stopped and not chunks[-2].durable and chunk.durable)
        assert [chunk.durable for chunk in chunks[:5]] == [True] * 5
        assert any(not chunk.durable for chunk in chunks)
        assert resumed
        assert generation.finished.durable
        ids = [token.id for chunk in chunks for token in chunk.tokens]
        with Redis.from_url(redis.url) as raw:
            journal = raw.get("splitspec:{/away}:journal")
        assert isinstance(journal, bytes)
        assert len(journal) == 4 * (len(PROMPT) + 1200)
        assert ids[-1] == int.from_bytes(journal[-4:], "little")


async def test_a_redis_that_is_full_in_mid_stream(stack: Stack, redis: EmbeddedRedis) -> None:
    async with AsyncClient(stack.address) as client:
        generation = ask(client, "full", PROMPT, 100)
        await generation.read()
        with full(redis):
            await generation.result()
            assert not generation.finished.durable
            for session_id in ("full", "another"):
                with pytest.raises(UnavailableError, match=r"Redis at .* is full"):
                    await ask(client, session_id, TURN, 2).result()
            assert (await client.describe()).models
        turn = await next_turn(client, "full")
    assert turn.started.prompt_tokens == len(PROMPT) + 100 + len(TURN)


async def test_redis_is_away_for_longer_than_the_lease(stack: Stack, redis: EmbeddedRedis) -> None:
    async with AsyncClient(stack.address) as client:
        await lose_sight_of_redis(ask(client, "long", PROMPT, 100), redis)
        await asyncio.sleep(LEASE_S)
        redis.start()
        turn = await next_turn(client, "long")
    assert turn.started.prompt_tokens == len(PROMPT) + 100 + len(TURN)


async def test_the_coordinator_dies_while_redis_is_away(stack: Stack, redis: EmbeddedRedis) -> None:
    """The tokens are gone with it: whoever asks next is told, and not answered from half of the text."""
    async with AsyncClient(stack.address) as client:
        await lose_sight_of_redis(ask(client, "dies", PROMPT, 100), redis)
        await stack.coordinator.kill()
        redis.start()
        await stack.coordinator.start()
        async with AsyncClient(stack.address) as another:
            with pytest.raises(LostTokensError, match="cut off with its coordinator"):
                await next_turn(another, "dies")
            # The same client, had it found the coordinator at the same address.
            seen = len(PROMPT) + 100
            with pytest.raises(LostTokensError, match=f"expected the {seen} that its client has seen"):
                await another.generate(TURN, session_id="dies", session_length=seen).result()
            assert await another.close_session("dies")
            assert (await next_turn(another, "dies")).started.prompt_tokens == len(TURN)
