"""Real parts for every test that asks for one: a Redis, the demo model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from redis import Redis

from splitspec.models import fetch_demo_model
from splitspec.registry import EmbeddedRedis, Registry

# How long an example takes says nothing about whether it is right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The directory of the demo model, fetched once."""
    return fetch_demo_model()


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
