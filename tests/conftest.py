"""A real Redis for every test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis

from splitspec.registry import EmbeddedRedis, Registry


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The url of a Redis that all tests share."""
    with EmbeddedRedis() as redis:
        yield redis.url


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    """A registry on an empty Redis."""
    with Redis.from_url(redis_url) as client:
        client.flushall()
    registry = await Registry.connect(redis_url)
    yield registry
    await registry.close()
