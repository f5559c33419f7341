"""What a request's rounds add up to: acceptance in vLLM's shape, and where the time went."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from protos.v1 import common_pb2, coordinator_pb2
from splitspec.types import Origin


@dataclass
class Stats:
    """Counts and sums over one request. Durations are in seconds."""

    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    histogram: Counter[int] = field(default_factory=Counter)
    longest: int = 0
    draft_tokens: int = 0
    next_tokens: int = 0
    plain_rounds: int = 0
    missed_rounds: int = 0
    one_hot_tokens: int = 0
    open_s: float = 0.0
    draft_s: float = 0.0
    draft_wire_s: float = 0.0
    target_s: float = 0.0
    target_wire_s: float = 0.0

    def count(self, verdict: common_pb2.Verdict) -> None:
        """Count a round by its verdict."""
        if verdict.next_origin == Origin.PLAIN.value:
            self.plain_rounds += 1
            return
        self.histogram[verdict.num_accepted] += 1
        self.longest = max(self.longest, verdict.num_draft_tokens)
        self.draft_tokens += verdict.num_draft_tokens
        self.next_tokens += len(verdict.token_ids) - verdict.num_accepted
        self.one_hot_tokens += verdict.num_one_hot

    def add_draft(self, waited_s: float, timings: common_pb2.ServerTimings) -> None:
        own = min(waited_s, timings.total_us / 1e6)
        self.draft_s += own
        self.draft_wire_s += waited_s - own

    def add_target(self, waited_s: float, timings: common_pb2.ServerTimings) -> None:
        own = min(waited_s, timings.total_us / 1e6)
        self.target_s += own
        self.target_wire_s += waited_s - own

    def acceptance(self) -> coordinator_pb2.AcceptanceStats:
        rounds = sum(self.histogram.values())
        accepted = sum(count * times for count, times in self.histogram.items())
        return coordinator_pb2.AcceptanceStats(
            num_spec_steps=rounds,
            num_draft_tokens=self.draft_tokens,
            num_accepted_draft_tokens=accepted,
            mean_acceptance_length=(accepted + self.next_tokens) / rounds if rounds else 1.0,
            draft_acceptance_rate=accepted / self.draft_tokens if self.draft_tokens else 0.0,
            acceptance_histogram=[self.histogram[i] for i in range(self.longest + 1)] if rounds else [],
            num_plain_steps=self.plain_rounds,
            num_one_hot_tokens=self.one_hot_tokens,
            num_draft_missed_steps=self.missed_rounds,
        )

    def timings(self) -> coordinator_pb2.Timings:
        now = time.perf_counter()
        return coordinator_pb2.Timings(
            time_to_first_token_us=_us((self.first_token or now) - self.started),
            total_us=_us(now - self.started),
            open_us=_us(self.open_s),
            draft_us=_us(self.draft_s),
            target_us=_us(self.target_s),
            draft_wire_us=_us(self.draft_wire_s),
            target_wire_us=_us(self.target_wire_s),
        )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
