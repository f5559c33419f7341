"""Continuous batching: the steps of all sessions of a worker, joined pass by pass on the model's thread.

A job is a generator. It yields the passes that it needs one after the other, gets the logits of each, and
returns its result: a verdict and a prompt yield one pass, a draft one for each token. Between two passes
every job that is ready brings its next one, so that sessions join and leave at any pass. The event loop
never waits for a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import structlog
import torch

from protos.v1 import common_pb2
from splitspec.engine.feed import PIECE, Feed
from splitspec.errors import OverloadedError, UnavailableError
from splitspec.types import MAX_NUM_DRAFT_TOKENS

log = structlog.get_logger()
R = TypeVar("R")


class Model(Protocol):
    """What a pass runs on: `CausalLM`."""

    def forward_batch(self, feeds: Sequence[Feed]) -> list[torch.Tensor]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One session's share of a pass. Its answer is [feed.num_rows, vocabulary] float32 logits."""

    model: Model
    feed: Feed


Steps: TypeAlias = Generator[Pass, torch.Tensor, R]


class Timer:
    """Collects the durations of one answer, from the message's arrival on."""

    def __init__(self) -> None:
        self.queue_s = 0.0
        self.model_s = 0.0
        self.sampling_s = 0.0
        #: Of all sessions together in the last pass.
        self.positions = 0
        self._told = (0.0, 0.0, 0.0, time.perf_counter())

    def to_proto(self) -> common_pb2.ServerTimings:
        """What was collected since the last lap."""
        queue, model, sampling, total = (
            round((now - told) * 1e6) for now, told in zip(self._now(), self._told, strict=True)
        )
        return common_pb2.ServerTimings(
            queue_us=queue,
            model_us=model,
            sampling_us=sampling,
            total_us=total,
            positions=self.positions,
        )

    def lap(self) -> common_pb2.ServerTimings:
        """The same, and a new lap begins: for one of several answers to a message."""
        timings = self.to_proto()
        self._told = self._now()
        return timings

    def _now(self) -> tuple[float, float, float, float]:
        return self.queue_s, self.model_s, self.sampling_s, time.perf_counter()


@dataclass(eq=False)
class _Job:
    """since: when its wait began, for the thread or for a pass. starved_since: when the pool had no room.

    wanted: the pass that it waits for, less what of a long feed was fed already. held: the tokens of its KV
    when its wait for room began. While it waits others may take the KV's blocks; then the tokens that are
    gone are fed again first.
    """

    steps: Steps[Any]
    timer: Timer
    future: asyncio.Future[Any]
    stopped: Callable[[], bool]
    since: float = field(default_factory=time.perf_counter)
    starved_since: float | None = None
    wanted: Pass | None = None
    held: list[int] = field(default_factory=list)

    @property
    def left(self) -> bool:
        """Nobody wants its result any more."""
        return self.future.cancelled() or self.stopped()

    @property
    def model(self) -> Model:
        assert self.wanted is not None
        return self.wanted.model

    @property
    def feed(self) -> Feed:
        assert self.wanted is not None
        feed = self.wanted.feed
        lost = self.held[feed.kv.length :]
        return Feed(feed.kv, lost, 0, num_following=len(feed.token_ids)) if lost else feed

    @property
    def is_prompt(self) -> bool:
        """Fed piece by piece, as there is room in a pass; whatever else is fed comes from a round."""
        return len(self.feed.token_ids) > MAX_NUM_DRAFT_TOKENS + 1 and not self.feed.parents

    @property
    def piece(self) -> Feed:
        """What is fed of it in one pass: of a prompt up to the next multiple of PIECE, in any batch.

        The rows come with its end.
        """
        feed = self.feed
        most = PIECE - feed.kv.length % PIECE
        count = min(most, len(feed.token_ids) - feed.num_rows)
        if not self.is_prompt or len(feed.token_ids) <= most or count < 1:
            return feed
        return feed.cut(count)[0]

    def fed(self, piece: Feed) -> bool:
        """A piece was fed; whether it was the last."""
        assert self.wanted is not None
        if piece.kv.length <= len(self.held):
            return False
        self.held = []
        if piece is self.wanted.feed:
            return True
        self.wanted = Pass(self.model, self.wanted.feed.cut(len(piece.token_ids))[1])
        return False

    def wait_for_room(self, now: float) -> None:
        """Until it is tried again, others may take what its KV holds."""
        assert self.wanted is not None
        feed = self.wanted.feed
        self.starved_since = self.starved_since or now
        if feed.can_be_fed_again:
            self.held = self.held or list(feed.kv.token_ids)
            feed.kv.rest()

    def wake(self) -> None:
        """Others may take nothing any more."""
        if self.wanted is not None and self.starved_since is not None:
            self.wanted.feed.kv.wake()


class Scheduler:
    """Runs jobs on a thread of its own.

    max_positions: of all sessions together in one pass; a longer prompt is fed in pieces. full_wait_s: how
    long a job waits for room in a full pool of KV before its OverloadedError is raised. One that waits keeps
    nothing from others: it takes room for a whole prompt or none, and what its KV held is theirs to take.
    """

    def __init__(self, *, max_positions: int, full_wait_s: float = 5.0) -> None:
        self._max_positions = max_positions
        self._full_wait_s = full_wait_s
        self._submitted: queue.SimpleQueue[_Job | Callable[[], None] | None] = queue.SimpleQueue()
        #: In the order of their last pass, those that waited longest first.
        self._ready: list[_Job] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    async def run(self, steps: Steps[R], timer: Timer, stopped: Callable[[], bool] = lambda: False) -> R:
        """The job's result, or what it raises.

        Waiting for passes goes to timer.queue_s; passes and the job's own work, less what the job itself adds
        to timer.sampling_s, go to timer.model_s. When the caller is cancelled, or `stopped` says so, a pass
        that runs is finished, and the job gets no further; then its caller is cancelled, too. Raises
        UnavailableError once the scheduler is closed.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._submitted.put(_Job(steps, timer, future, stopped))
        if self._closed:
            raise UnavailableError("the worker is shutting down")
        return await future

    def post(self, call: Callable[[], None]) -> None:
        """Call it on the thread, between two passes and in its order among the jobs; from any thread."""
        self._submitted.put(call)

    def close(self) -> None:
        """End the thread after the pass that runs. Jobs that wait never get their result."""
        self._closed = True
        self._submitted.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take_submitted():
            self._drop_left()
            starved = [job for job in self._ready if job.starved_since is not None]
            if len(starved) < len(self._ready):
                self._pass(self._choose())
            for job in starved:  # by itself: whether there is room is seen before anything runs
                job.wake()
                self._pass([(job, job.piece)])
            if starved and len(starved) == len(self._ready):
                time.sleep(0.001)

    def _take_submitted(self) -> bool:
        """Start the jobs that came in; waits for one when there is nothing else to do. False at the end."""
        while not self._submitted.empty() or not self._ready:
            job = self._submitted.get()
            if job is None:
                return False
            if not isinstance(job, _Job):
                _call(job)
            elif job.left:
                _on_loop(job.future, job.future.cancel)
            else:
                self._advance(job, None)
            del job  # what it holds isn't kept while nothing comes
        return True

    def _drop_left(self) -> None:
        for job in [job for job in self._ready if job.left]:
            self._ready.remove(job)
            job.wake()
            job.steps.close()
            _on_loop(job.future, job.future.cancel)

    def _choose(self) -> list[tuple[_Job, Feed]]:
        """Jobs of one model for the next pass, with what they feed in it.

        Those of rounds come first, those that waited longest first among them; then prompts, for which the
        positions of one piece are always kept.
        """
        waiting = [job for job in self._ready if job.starved_since is None]
        waiting = [job for job in waiting if job.model is waiting[0].model]
        prompts = [job for job in waiting if job.is_prompt]
        kept = PIECE if prompts else 0
        chosen: list[tuple[_Job, Feed]] = []
        left = self._max_positions - kept
        for job in waiting:
            if not job.is_prompt and (len(job.feed.token_ids) <= left or not chosen):
                chosen.append((job, job.feed))
                left -= len(job.feed.token_ids)
        left += kept
        for job in prompts:
            piece = job.piece
            if len(piece.token_ids) <= left or not chosen:
                chosen.append((job, piece))
                left -= len(piece.token_ids)
        return chosen

    def _pass(self, jobs: list[tuple[_Job, Feed]]) -> None:
        """One pass for all of them. If it fails, each gets one of its own: that shows whose fault it is."""
        started = time.perf_counter()
        try:
            answers = jobs[0][0].model.forward_batch([feed for _, feed in jobs])
        except Exception as error:
            if len(jobs) == 1:
                self._failed(jobs[0][0], error)
            else:
                for each in jobs:
                    self._pass([each])
            return
        ended = time.perf_counter()
        positions = sum(len(feed.token_ids) for _, feed in jobs)
        for job, _ in jobs:
            self._ready.remove(job)
            job.timer.positions = positions
            job.timer.queue_s += started - job.since
            job.timer.model_s += ended - started
            job.since, job.starved_since = ended, None
        for (job, feed), logits in zip(jobs, answers, strict=True):
            if job.fed(feed):
                self._advance(job, logits)
            else:
                self._ready.append(job)

    def _failed(self, job: _Job, error: Exception) -> None:
        """Without room the job waits for others to end; otherwise it gets the error where it asked."""
        if isinstance(error, OverloadedError):
            now = time.perf_counter()
            if now - (job.starved_since or now) < self._full_wait_s:
                job.wait_for_room(now)
                return
        self._ready.remove(job)
        self._advance(job, error)

    def _advance(self, job: _Job, answer: torch.Tensor | Exception | None) -> None:
        """Let a job go on with its answer, up to its next pass or its end."""
        started, sampling_before = time.perf_counter(), job.timer.sampling_s
        job.timer.queue_s += started - job.since
        outcome: Callable[[], None] | None = None
        try:
            if isinstance(answer, Exception):
                job.wanted = job.steps.throw(answer)
            else:
                job.wanted = job.steps.send(answer)  # type: ignore[arg-type]  # None starts it
        except StopIteration as end:
            outcome = _setter(job.future, result=end.value)
        except BaseException as error:
            outcome = _setter(job.future, error=error)
        job.since = time.perf_counter()
        job.timer.model_s += job.since - started - (job.timer.sampling_s - sampling_before)
        if outcome is None:
            self._ready.append(job)
        else:
            _on_loop(job.future, outcome)


def _call(call: Callable[[], None]) -> None:
    """Nobody waits for it, and what goes wrong in it must not end the thread of all sessions."""
    try:
        call()
    except Exception:
        log.exception("a call on the model's thread failed")


def _setter(
    future: asyncio.Future[Any], *, result: Any = None, error: BaseException | None = None
) -> Callable[[], None]:
    def settle() -> None:
        if future.done():  # cancelled meanwhile
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    return settle


def _on_loop(future: asyncio.Future[Any], call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
        future.get_loop().call_soon_threadsafe(call)


def run_alone(steps: Steps[R]) -> R:
    """A job's result with each pass run for it alone, in this thread."""
    answer: torch.Tensor | None = None
    try:
        while True:
            wanted = steps.send(answer)  # type: ignore[arg-type]  # None starts it
            (answer,) = wanted.model.forward_batch([wanted.feed])
    except StopIteration as end:
        result: R = end.value
        return result
