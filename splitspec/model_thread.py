"""The one thread that runs a worker's model, so that the event loop never waits for a pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from protos.v1 import common_pb2

R = TypeVar("R")


class Timer:
    """Collects the durations of one answer, from the message's arrival on."""

    def __init__(self) -> None:
        self._arrived = time.perf_counter()
        self.queue_s = 0.0
        self.model_s = 0.0
        self.sampling_s = 0.0

    def to_proto(self) -> common_pb2.ServerTimings:
        return common_pb2.ServerTimings(
            queue_us=round(self.queue_s * 1e6),
            model_us=round(self.model_s * 1e6),
            sampling_us=round(self.sampling_s * 1e6),
            total_us=round((time.perf_counter() - self._arrived) * 1e6),
        )


class ModelThread:
    """Runs jobs one after another in the order of their submission.

    When a caller is cancelled, a job that runs is finished, and the next one sees its effects; a job that
    still waits is dropped.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def run(self, job: Callable[[], R], timer: Timer) -> R:
        """The job's result; the wait for the thread goes to timer.queue_s, the run itself to timer.model_s
        less what the job adds to timer.sampling_s."""
        submitted = time.perf_counter()

        def timed() -> R:
            started = time.perf_counter()
            timer.queue_s += started - submitted
            sampling_before = timer.sampling_s
            try:
                return job()
            finally:
                timer.model_s += time.perf_counter() - started - (timer.sampling_s - sampling_before)

        return await asyncio.get_running_loop().run_in_executor(self._executor, timed)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
