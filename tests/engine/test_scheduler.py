"""Jobs joined pass by pass; the model is a stand-in that notes what each pass was."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch

from splitspec.engine.feed import Feed
from splitspec.engine.scheduler import Pass, Scheduler, Steps, Timer, run_alone
from splitspec.errors import OverloadedError, UnavailableError
from tests import waiting
from tests.waiting import all_ready


class Named:
    """The stand-in for a KV: a job's name, and how much it was fed."""

    def __init__(self, name: str) -> None:
        self.name, self.length = name, 0
        self.token_ids: list[int] = []

    def rest(self) -> None:
        """Nothing is taken from it."""

    def wake(self) -> None:
        """Nothing was taken from it."""


def feed(name: str, num_positions: int = 1, num_rows: int = 1) -> Feed:
    return Feed(Named(name), [0] * num_positions, num_rows)  # type: ignore[arg-type]


class Noting:
    """Answers each feed with a row that says how many passes there were. `gate` holds a pass up."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = []
        self.positions: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.full: set[str] = set()
        self.broken: set[str] = set()

    def forward_batch(self, feeds: Sequence[Any]) -> list[torch.Tensor]:
        names = [feed.kv.name for feed in feeds]
        if self.full & set(names):
            raise OverloadedError("full", retry_after_s=1.0)
        if self.broken & set(names):
            raise ValueError("broken")
        self.passes.append(names)
        self.positions.append([len(feed.token_ids) for feed in feeds])
        for feed in feeds:
            feed.kv.length += len(feed.token_ids)
        assert self.gate.wait(10)
        return [torch.full((feed.num_rows, 1), len(self.passes)) for feed in feeds]


@pytest.fixture
def model() -> Noting:
    return Noting()


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(max_positions=300, full_wait_s=0.2)
    yield scheduler
    await asyncio.to_thread(scheduler.close)


def steps(model: Noting, name: str, count: int, positions: int = 1, rows: int = 1) -> Steps[list[int]]:
    """So many passes; the result is the number of each."""
    numbers = []
    for _ in range(count):
        logits = yield Pass(model, feed(name, positions, rows))
        numbers.append(int(logits[0, 0]) if rows else 0)
    return numbers


async def until(model: Noting, num_passes: int) -> None:
    await waiting.until(lambda: len(model.passes) >= num_passes)


async def held_up(model: Noting, scheduler: Scheduler, *jobs: Steps[Any]) -> list[asyncio.Task[Any]]:
    """The jobs, all submitted while another one's pass runs; the pass then goes on."""
    model.gate.clear()
    first = asyncio.create_task(scheduler.run(steps(model, "first", 1), Timer()))
    await until(model, 1)
    tasks = [asyncio.create_task(scheduler.run(job, Timer())) for job in jobs]
    await all_ready()
    model.gate.set()
    await first
    return tasks


async def test_jobs_share_passes_and_leave_when_they_are_done(model: Noting, scheduler: Scheduler) -> None:
    tasks = await held_up(model, scheduler, *(steps(model, name, n) for name, n in [("a", 3), ("b", 1)]))
    assert await asyncio.gather(*tasks) == [[2, 3, 4], [2]]
    assert model.passes == [["first"], ["a", "b"], ["a"], ["a"]]


async def test_a_job_joins_at_the_next_pass(model: Noting, scheduler: Scheduler) -> None:
    model.gate.clear()
    long = asyncio.create_task(scheduler.run(steps(model, "long", 3), Timer()))
    await until(model, 1)
    short = asyncio.create_task(scheduler.run(steps(model, "short", 1), Timer()))
    await all_ready()
    model.gate.set()
    assert await short == [2]
    assert await long == [1, 2, 3]
    assert model.passes[1] == ["long", "short"]


async def test_a_job_without_passes_needs_none(model: Noting, scheduler: Scheduler) -> None:
    assert await scheduler.run(steps(model, "none", 0), Timer()) == []
    assert not model.passes


async def test_rounds_come_before_prompts_which_keep_room_for_a_piece(
    model: Noting, scheduler: Scheduler
) -> None:
    """300 positions: 128 are kept for a prompt, so that the rounds of 17 have 172, which is ten of them."""
    rounds = [steps(model, f"r{i}", 1, positions=17) for i in range(12)]
    prompts = [steps(model, "prompt", 1, positions=200, rows=0), steps(model, "another", 1, positions=19)]
    tasks = await held_up(model, scheduler, *prompts, *rounds)
    await asyncio.gather(*tasks)
    assert model.passes[1:] == [
        [*(f"r{i}" for i in range(10)), "prompt"],
        ["r10", "r11", "another", "prompt"],
    ]
    assert model.positions[1:] == [[17] * 10 + [128], [17, 17, 19, 72]]


async def test_a_long_prompt_does_not_hold_a_short_one_up(model: Noting, scheduler: Scheduler) -> None:
    tasks = await held_up(
        model,
        scheduler,
        steps(model, "long", 1, positions=1300, rows=1),
        steps(model, "short", 1, positions=30, rows=1),
    )
    assert await tasks[1] == [2]
    assert await tasks[0] == [12]
    assert model.positions[1:3] == [[128, 30], [128]]


async def test_pieces_end_at_multiples_whatever_else_is_in_the_pass(
    model: Noting, scheduler: Scheduler
) -> None:
    """So that the same text is fed in the same pieces: more than a few rows may round by their number."""
    kv = Named("a")
    kv.length = 100

    def job() -> Steps[int]:
        logits = yield Pass(model, Feed(kv, [0] * 300, 10))  # type: ignore[arg-type]
        return len(logits)

    assert await scheduler.run(job(), Timer()) == 10
    assert model.positions == [[28], [128], [128], [16]]


async def test_rounds_that_are_too_many_take_turns(model: Noting) -> None:
    scheduler = Scheduler(max_positions=40)
    tasks = await held_up(model, scheduler, *(steps(model, name, 2, positions=17) for name in "abc"))
    await asyncio.gather(*tasks)
    assert model.passes[1:] == [["a", "b"], ["c", "a"], ["b", "c"]]
    await asyncio.to_thread(scheduler.close)


async def test_more_positions_than_the_budget_go_alone(model: Noting) -> None:
    scheduler = Scheduler(max_positions=10)
    tasks = await held_up(model, scheduler, steps(model, "big", 1, positions=17), steps(model, "a", 1))
    await asyncio.gather(*tasks)
    assert model.passes[1:] == [["big"], ["a"]]
    await asyncio.to_thread(scheduler.close)


async def test_models_have_passes_of_their_own(model: Noting, scheduler: Scheduler) -> None:
    other = Noting()
    tasks = await held_up(model, scheduler, steps(model, "a", 2), steps(other, "b", 2), steps(model, "c", 2))
    await asyncio.gather(*tasks)
    assert model.passes[1:] == [["a", "c"]] * 2
    assert other.passes == [["b"]] * 2


async def test_a_bad_job_ends_alone(model: Noting, scheduler: Scheduler) -> None:
    model.broken.add("bad")
    good, bad = await held_up(model, scheduler, steps(model, "good", 2), steps(model, "bad", 1))
    with pytest.raises(ValueError, match="broken"):
        await bad
    assert len(await good) == 2


async def test_an_error_is_raised_where_the_job_asked(model: Noting, scheduler: Scheduler) -> None:
    model.broken.add("bad")

    def catching() -> Steps[str]:
        try:
            yield Pass(model, feed("bad"))
        except ValueError:
            yield Pass(model, feed("good"))
        return "caught"

    assert await scheduler.run(catching(), Timer()) == "caught"
    assert model.passes == [["good"]]


async def test_without_room_a_job_waits_while_others_go_on(model: Noting, scheduler: Scheduler) -> None:
    model.full.add("starved")
    starved, other = await held_up(model, scheduler, steps(model, "starved", 1), steps(model, "other", 5))
    assert len(await other) == 5
    model.full.clear()
    assert len(await starved) == 1


async def test_a_pool_that_stays_full_is_an_error(model: Noting, scheduler: Scheduler) -> None:
    model.full.add("starved")
    with pytest.raises(OverloadedError, match="full"):
        await scheduler.run(steps(model, "starved", 1), Timer())


@pytest.mark.parametrize("by", ["cancel", "stopped"])
async def test_a_job_that_is_left_gets_no_further_pass(model: Noting, scheduler: Scheduler, by: str) -> None:
    model.gate.clear()
    stopped = False
    closed = threading.Event()

    def job() -> Steps[None]:
        try:
            while True:
                yield Pass(model, feed("left"))
        finally:
            closed.set()

    task = asyncio.create_task(scheduler.run(job(), Timer(), lambda: stopped))
    await until(model, 1)
    if by == "cancel":
        task.cancel()
    stopped = True
    model.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(closed.wait, 5)
    count = len(model.passes)
    assert await scheduler.run(steps(model, "next", 1), Timer()) == [count + 1]


async def test_times_add_up(model: Noting, scheduler: Scheduler) -> None:
    timer = Timer()

    def job() -> Steps[None]:
        yield Pass(model, feed("a"))
        timer.sampling_s += 1e-6

    tasks = await held_up(model, scheduler, steps(model, "b", 1))
    await scheduler.run(job(), timer)
    await asyncio.gather(*tasks)
    total = timer.to_proto().total_us / 1e6
    assert min(timer.queue_s, timer.model_s) > 0
    assert timer.queue_s + timer.model_s + timer.sampling_s <= total + 1e-6


async def test_a_call_runs_on_the_thread_in_its_order(model: Noting, scheduler: Scheduler) -> None:
    threads = []
    scheduler.post(lambda: threads.append(threading.current_thread().name))
    await scheduler.run(steps(model, "a", 1), Timer())
    assert threads == ["model"]


async def test_a_call_that_fails_does_not_end_the_thread(model: Noting, scheduler: Scheduler) -> None:
    scheduler.post(lambda: [][0])
    assert await scheduler.run(steps(model, "a", 1), Timer()) == [1]


async def test_a_closed_scheduler_takes_nothing(model: Noting) -> None:
    scheduler = Scheduler(max_positions=1)
    await asyncio.to_thread(scheduler.close)
    with pytest.raises(UnavailableError, match="shutting down"):
        await scheduler.run(steps(model, "a", 1), Timer())


def test_run_alone(model: Noting) -> None:
    assert run_alone(steps(model, "a", 3)) == [1, 2, 3]
    assert run_alone(steps(model, "a", 0)) == []
