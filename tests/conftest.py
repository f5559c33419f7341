"""Real parts for every test that asks for one: a Redis, the demo model."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from redis import Redis

from splitspec.models import fetch_demo_model
from splitspec.registry import EmbeddedRedis, Registry

# Set before torch loads, here and in every process that a test starts: one thread each, so that tests that
# run side by side don't wait for one another's threads.
os.environ["OMP_NUM_THREADS"] = "1"

# gRPC's own channels, which some tests open, go through a proxy of the environment even to this machine.
os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("no_proxy"), "127.0.0.1,localhost"]))

# How long an example takes says nothing about whether it is right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: where files are shared out, short ones fill the end."""
    items.sort(key=lambda item: "integration" not in item.path.parts)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The directory of the demo model, fetched once."""
    return fetch_demo_model()


@pytest.fixture(scope="session")
def tiny_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo model's tokenizer: passes of a few milliseconds, text without sense."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # With this seed no greedy choice of the tests' prompts is a near tie of float32.
    torch.manual_seed(6)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=2,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_model / name, directory / name)
    return directory


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
