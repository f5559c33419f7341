"""What one round tells about the workers and the draft."""

from __future__ import annotations

from dataclasses import dataclass

from protos.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer; all in ms. busy_ms: model passes and sampling. total_ms: arrival to departure.

    wait_ms: from asking to the answer. None when that isn't a round trip and the worker's time: the answer
    was there before it was asked for, or the worker had another message of the session in hand. positions:
    of all sessions in the pass; None when the worker doesn't tell.
    """

    queue_ms: float
    busy_ms: float
    total_ms: float
    wait_ms: float | None = None
    positions: int | None = None

    @classmethod
    def of(
        cls, timings: common_pb2.ServerTimings, wait_s: float | None = None, positions: int | None = None
    ) -> Answer:
        busy_us = timings.model_us + timings.sampling_us
        wait_ms = None if wait_s is None else wait_s * 1e3
        return cls(timings.queue_us / 1e3, busy_us / 1e3, timings.total_us / 1e3, wait_ms, positions)

    @property
    def round_trip_ms(self) -> float | None:
        return None if self.wait_ms is None else max(0.0, self.wait_ms - self.total_ms)


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """One round's outcome.

    num_asked: draft tokens that the draft worker was asked for; 0 when it wasn't, or was lost meanwhile.
    num_draft_tokens, num_accepted: as in the verdict. num_tokens: committed. duration_ms: from the choice to
    the verdict. target: the verdict's answer. draft: the proposal's, None when none came in time. hit:
    whether the proposal had been prepared for this very outcome; None when none was to be.
    """

    num_asked: int
    num_draft_tokens: int
    num_accepted: int
    num_tokens: int
    duration_ms: float
    target: Answer
    draft: Answer | None = None
    hit: bool | None = None
