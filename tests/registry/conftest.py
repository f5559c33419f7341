from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from splitspec.registry import Registry


@pytest.fixture
def client(redis_url: str, registry: Registry) -> Iterator[Redis]:
    """A plain client on the registry's server, to look at the keys."""
    with Redis.from_url(redis_url) as client:
        yield client
