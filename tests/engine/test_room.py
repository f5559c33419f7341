"""A pool of KV without room for everybody: who waits holds nothing up, and everybody gets through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from splitspec.engine.feed import Feed
from splitspec.engine.kv import KV
from splitspec.engine.paged import PagedLM
from splitspec.engine.scheduler import Pass, Scheduler, Steps, Timer, run_alone
from splitspec.engine.simulated import SimulatedConfig, SimulatedLM, is_simulated
from splitspec.errors import OverloadedError
from tests.engine import tiny
from tests.waiting import until

NUM_BLOCKS = 8


@pytest.fixture(scope="module", params=["simulated", "llama"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        return tiny.checkpoint(path, tiny.CONFIGS["llama"])
    SimulatedConfig(vocabulary_size=64, seed=3).save(path)
    return path


def load(directory: Path, kv_memory_bytes: int | None) -> PagedLM:
    if is_simulated(directory):
        return SimulatedLM(directory, "simulated", "float32", kv_memory_bytes=kv_memory_bytes)
    return tiny.load(directory, kv_memory_bytes=kv_memory_bytes)


@pytest.fixture
def model(directory: Path) -> PagedLM:
    """One whose pool has NUM_BLOCKS blocks."""
    return load(directory, NUM_BLOCKS * load(directory, None).pool.block_bytes)


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    """One that lets nobody wait in vain while a test runs."""
    scheduler = Scheduler(max_positions=300, full_wait_s=1000)
    yield scheduler
    await asyncio.to_thread(scheduler.close)


def text(model: PagedLM, seed: int, num_blocks: float) -> list[int]:
    length = round(num_blocks * model.pool.block_size)
    return [(seed + index * index) % 64 for index in range(length)]


def prompt(model: PagedLM, kv: KV, token_ids: list[int]) -> Steps[int]:
    """Fed as one text; the token that follows."""
    logits = yield Pass(model, Feed(kv, token_ids, 1))
    return int(logits[-1].argmax())


def greedy(model: PagedLM, kv: KV, token_ids: list[int], count: int) -> Steps[list[int]]:
    """So many tokens after a text, one in each pass."""
    tokens = [(yield from prompt(model, kv, token_ids))]
    while len(tokens) < count:
        tokens.append((yield from prompt(model, kv, tokens[-1:])))
    return tokens


def waiting(scheduler: Scheduler) -> int:
    """Jobs that lack room."""
    return sum(job.starved_since is not None for job in scheduler._ready)


async def test_a_prompt_that_waits_takes_no_room_from_others(model: PagedLM, scheduler: Scheduler) -> None:
    """All of its pieces have room, or none is fed: half a prompt helps nobody."""
    expected = run_alone(prompt(model, model.new_kv(), text(model, 2, 6)))
    holding, large, small = (model.new_kv() for _ in range(3))
    await scheduler.run(prompt(model, holding, text(model, 1, 3)), Timer())
    waits = asyncio.create_task(scheduler.run(prompt(model, large, text(model, 2, 6)), Timer()))
    await until(lambda: waiting(scheduler) == 1)
    assert (large.length, model.pool.num_used) == (0, 3)
    async with asyncio.timeout(30):
        assert await scheduler.run(greedy(model, small, text(model, 3, 3), 20), Timer())
    assert not waits.done()
    small.free()
    holding.free()
    assert await waits == expected


async def test_texts_that_grow_beyond_the_pool_all_get_to_their_end(
    model: PagedLM, scheduler: Scheduler
) -> None:
    """Each holds what the others need: one gives way, and is fed again behind them."""
    count, starts = 4 * model.pool.block_size, [text(model, seed, 1.5) for seed in range(3)]
    alone = [run_alone(greedy(model, model.new_kv(), start, count)) for start in starts]
    kvs = [model.new_kv() for _ in starts]

    async def run(kv: KV, start: list[int]) -> list[int]:
        tokens = await scheduler.run(greedy(model, kv, start, count), Timer())
        assert kv.token_ids == [*start, *tokens[:-1]]
        kv.free()
        return tokens

    async with asyncio.timeout(60):
        assert await asyncio.gather(*map(run, kvs, starts)) == alone


async def test_who_waits_for_a_prefix_to_grow_gives_it_back(model: PagedLM, scheduler: Scheduler) -> None:
    """Two texts begin with what is cached, and go on for more than the rest of the pool."""
    starts, more = [text(model, 1, 3), text(model, 2, 3)], text(model, 3, 3)
    expected = [run_alone(prompt(model, model.new_kv(), start + more)) for start in starts]
    for start in starts:
        kv = model.new_kv()
        model.forward(kv, start, 0)
        kv.finalise(len(start))
        kv.free()
    assert model.pool.num_cached == 6
    kvs = [model.new_kv(token_ids=start) for start in starts]
    assert model.pool.num_used == 6

    async def run(kv: KV) -> int:
        token = await scheduler.run(prompt(model, kv, more), Timer())
        kv.free()
        return token

    async with asyncio.timeout(30):
        assert await asyncio.gather(*map(run, kvs)) == expected


async def test_what_a_waiting_text_has_lost_is_fed_before_it_goes_on(
    model: PagedLM, scheduler: Scheduler
) -> None:
    """A tree's pass, too, which says nothing of the tokens before it."""
    kv, other = model.new_kv(), model.new_kv()
    model.forward(kv, text(model, 1, 4), 0)
    model.forward(other, text(model, 2, 4), 0)

    def tree() -> Steps[list[int]]:
        logits = yield Pass(model, Feed(kv, [1, 2, 3], 3, parents=(0, 0)))
        return [int(row.argmax()) for row in logits]

    waits = asyncio.create_task(scheduler.run(tree(), Timer()))
    await until(lambda: waiting(scheduler) == 1)
    await scheduler.run(prompt(model, other, text(model, 2, 1)), Timer())
    assert kv.length == 0
    other.free()
    rows = await waits
    assert kv.token_ids == [*text(model, 1, 4), 1, 2, 3]
    kv.free()
    paths = ([1], [1, 2], [1, 3])
    assert rows == [run_alone(prompt(model, model.new_kv(), [*text(model, 1, 4), *path])) for path in paths]


async def test_who_gave_up_waiting_holds_what_is_left(model: PagedLM) -> None:
    scheduler = Scheduler(max_positions=300, full_wait_s=0.05)
    kv, other = model.new_kv(), model.new_kv()
    model.forward(other, text(model, 2, 7), 0)
    with pytest.raises(OverloadedError, match="1 of 8 are free"):
        await scheduler.run(prompt(model, kv, text(model, 1, 2)), Timer())
    await scheduler.run(prompt(model, kv, text(model, 1, 1)), Timer())
    assert kv.length == model.pool.block_size
    await asyncio.to_thread(scheduler.close)


def test_the_context_is_no_longer_than_what_the_pool_has_room_for(model: PagedLM, directory: Path) -> None:
    room = (NUM_BLOCKS - 1) * model.pool.block_size
    assert model.info.kv_tokens == model.info.max_context == room
    kv = model.new_kv()
    with pytest.raises(ValueError, match=f"{room + 1} tokens on top of 0 don't fit the context of {room}"):
        model.forward(kv, [*text(model, 1, NUM_BLOCKS - 1), 0], 0)
    # All of it, though its last block has to be copied, since others may look for it.
    model.forward(kv, text(model, 1, NUM_BLOCKS - 1), 0)
    kv.finalise(kv.length)
    kv.truncate(kv.length - 1)
    model.forward(kv, [7], 0)
    roomy = load(directory, None)
    assert roomy.info.max_context < roomy.info.kv_tokens
