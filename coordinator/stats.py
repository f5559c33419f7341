"""What a request adds up to, for its client, its trace and the metrics: acceptance, and where the time went.

Whatever happens is told to the request's Stats once, and goes to all three from there.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.request import Request
from protos.v1 import common_pb2, coordinator_pb2
from splitspec.errors import SplitspecError, status_code
from splitspec.telemetry import Span, Telemetry, names
from splitspec.telemetry.metrics import Labels, Metrics
from splitspec.telemetry.names import SpanName
from splitspec.telemetry.tracing import Metadata, error_type, is_cancelled
from splitspec.types import FinishReason, Origin, Rule

_METHOD = f"{coordinator_pb2.DESCRIPTOR.services_by_name['CoordinatorService'].full_name}/Generate"


@dataclass
class Wait:
    """A wait for a worker's answer, of which it is told. trace: goes into the message."""

    span: Span
    timings: common_pb2.ServerTimings | None = None

    @property
    def trace(self) -> common_pb2.TraceContext | None:
        return self.span.to_proto()

    def opened(self, opened: common_pb2.Opened) -> None:
        self.timings = opened.timings
        fed = opened.length - opened.cached_length
        self.span.set({names.CACHED_TOKENS: opened.cached_length, names.NUM_TOKENS: fed})

    def proposed(self, proposal: common_pb2.Proposal | None) -> None:
        """None when there was none in time."""
        if proposal is None:
            self.span.set({names.MISSED: True})
            return
        self.timings = proposal.timings
        self.span.set({names.NUM_DRAFT_TOKENS: proposal.num_draft_tokens})

    def verified(self, verdict: common_pb2.Verdict) -> None:
        self.timings = verdict.timings
        if verdict.HasField("features"):
            self.span.set({names.FEATURE_BYTES: len(verdict.features.data)})
        if verdict.num_draft_tokens:
            self.span.set({names.NUM_ACCEPTED: verdict.num_accepted, names.NUM_ONE_HOT: verdict.num_one_hot})


@dataclass
class Round:
    """One round's numbers. waited_s: seconds that it waited, by the wait's span."""

    span: Span
    num_draft_tokens: int = 0
    num_accepted: int = 0
    total_s: float = 0.0
    waited_s: defaultdict[SpanName, float] = field(default_factory=lambda: defaultdict(float))


@dataclass
class Stats:
    """Counts and sums over one request. span: the request's. labels: of its metrics. Durations in seconds."""

    span: Span
    metrics: Metrics
    labels: Labels
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    histogram: Counter[int] = field(default_factory=Counter)
    longest: int = 0
    draft_tokens: int = 0
    next_tokens: int = 0
    plain_rounds: int = 0
    missed_rounds: int = 0
    one_hot_tokens: int = 0
    seal_mismatches: int = 0
    ahead_rounds: int = 0
    output_tokens: int = 0

    def __post_init__(self) -> None:
        self._rules: Counter[Rule] = Counter()
        self._round = Round(self.span)
        self._rounds: list[Round] = []
        # By role and span: the workers' own time, and what waiting for them took beyond it.
        self._own_s: defaultdict[tuple[str, SpanName], float] = defaultdict(float)
        self._wire_s: defaultdict[tuple[str, SpanName], float] = defaultdict(float)

    def describe(self, request: Request) -> None:
        """What the request asks for."""
        self.span.set(
            {
                names.REQUEST_ID: request.request_id,
                names.CONVERSATION_ID: request.session_id,
                names.TEMPERATURE: request.sampling.temperature,
                names.TOP_P: request.sampling.top_p,
                names.TOP_K: request.sampling.top_k,
                names.RULE: request.rule.name.lower(),
            }
        )
        if request.stop.max_tokens is not None:
            self.span.set({names.MAX_TOKENS: request.stop.max_tokens})

    def choosing(self, role: str) -> Span:
        """The span of finding a worker."""
        span = self.span.child(names.CHOOSE)
        span.set({names.ROLE: role})
        return span

    @contextlib.contextmanager
    def waiting(self, name: SpanName, role: str, worker_id: str) -> Iterator[Wait]:
        """The wait for a worker's answer, which belongs to the round unless it opens the session."""
        opens = name is names.OPEN
        current, started = self._round, time.perf_counter()
        with (self.span if opens else current.span).child(name) as span:
            span.set({names.WORKER_ID: worker_id, **({names.ROLE: role} if opens else {})})
            wait = Wait(span)
            yield wait
            waited_s = time.perf_counter() - started
            current.waited_s[name] += waited_s
            if wait.timings is not None:
                own_s = min(waited_s, wait.timings.total_us / 1e6)
                self._own_s[role, name] += own_s
                self._wire_s[role, name] += waited_s - own_s
                self.metrics.record_wire(role, wait.timings, waited_s)
                span.set_timings(wait.timings, waited_s)
            else:  # a proposal that didn't come: all of it was waiting
                self._wire_s[role, name] += waited_s

    @property
    def trace(self) -> common_pb2.TraceContext | None:
        """Of the present round, for messages that nobody waits for."""
        return self._round.span.to_proto()

    @contextlib.contextmanager
    def round(self) -> Iterator[Span]:
        """One round, from its start to the final cut."""
        started = time.perf_counter()
        with self.span.child(names.ROUND_SPAN) as span:
            self._round = Round(span)
            yield span
        self._round.total_s = time.perf_counter() - started
        self.metrics.record(names.ROUND_DURATION, self._round.total_s)
        if self.span.recording:
            self._rounds.append(self._round)

    def miss(self) -> None:
        """The round is plain because no draft worker was there, or none in time."""
        self.missed_rounds += 1
        self.metrics.add(names.MISSED_ROUNDS)

    def count_prompt(self, num_tokens: int, cached: int) -> None:
        """Count the prompt, once it is fed."""
        self.metrics.add(names.PROMPT_TOKENS, num_tokens)
        self.metrics.add(names.PROMPT_TOKENS_CACHED, cached)
        self.span.set({names.INPUT_TOKENS: num_tokens, names.CACHED_TOKENS: cached})

    def count(self, verdict: common_pb2.Verdict, num_kept: int, *, ahead: bool) -> None:
        """Count a round by its verdict, and the tokens that the final cut has kept of it.

        ahead: its proposal was drafted before the verdict before it was known.
        """
        self.output_tokens += num_kept
        self.metrics.add(names.GENERATION_TOKENS, num_kept)
        self.metrics.add_round(verdict)
        current = self._round
        current.num_draft_tokens, current.num_accepted = verdict.num_draft_tokens, verdict.num_accepted
        if current.span.recording:
            current.span.set(
                {
                    names.ROUND: verdict.stamp.round,
                    names.BASE_LENGTH: verdict.stamp.base_length - len(verdict.token_ids),
                    names.NUM_DRAFT_TOKENS: verdict.num_draft_tokens,
                    names.NUM_ACCEPTED: verdict.num_accepted,
                    names.NEXT_ORIGIN: Origin(origin).name.lower()
                    if (origin := verdict.next_origin)
                    else "held",
                }
            )
        if verdict.next_origin == Origin.PLAIN.value:
            self.plain_rounds += 1
            return
        self.histogram[verdict.num_accepted] += 1
        self.longest = max(self.longest, verdict.num_draft_tokens)
        self.draft_tokens += verdict.num_draft_tokens
        self.ahead_rounds += ahead
        self.next_tokens += len(verdict.token_ids) - verdict.num_accepted
        self.one_hot_tokens += verdict.num_one_hot
        self.seal_mismatches += verdict.seal_mismatch
        self._rules[Rule(verdict.rule)] += 1

    @property
    def rule(self) -> Rule | None:
        """The rule that most proposals were verified by; None without proposals."""
        return self._rules.most_common(1)[0][0] if self._rules else None

    def finish(self, finished: coordinator_pb2.Finished) -> None:
        """The request ran to its end, with this as its last message."""
        now = time.perf_counter()
        first_token = self.first_token or now
        reason = FinishReason(finished.reason).name.lower()
        self.span.set({names.FINISH_REASONS: [reason], names.DRAFTER: finished.drafter})
        self.metrics.record(names.TIME_TO_FIRST_TOKEN, first_token - self.started, self.labels)
        if self.output_tokens > 1:
            per_token_s = (now - first_token) / (self.output_tokens - 1)
            self.metrics.record(names.TIME_PER_OUTPUT_TOKEN, per_token_s, self.labels)

    def end(self, error: BaseException | None) -> None:
        """The request is over; error: what ended it before its time."""
        self.span.set({names.RPC_STATUS: _status(error), names.OUTPUT_TOKENS: self.output_tokens})
        if self.span.recording:
            waits = [round.waited_s for round in self._rounds]
            self.span.set(
                {
                    names.ROUNDS_NUM_DRAFT_TOKENS: [round.num_draft_tokens for round in self._rounds],
                    names.ROUNDS_NUM_ACCEPTED: [round.num_accepted for round in self._rounds],
                    names.ROUNDS_PROPOSE_US: [_us(wait[names.PROPOSE]) for wait in waits],
                    names.ROUNDS_VERIFY_US: [_us(wait[names.VERIFY] + wait[names.DECODE]) for wait in waits],
                    names.ROUNDS_TOTAL_US: [_us(round.total_s) for round in self._rounds],
                }
            )
        labels = self.labels if error is None else {**self.labels, names.ERROR_TYPE: error_type(error)}
        self.metrics.record(names.REQUEST_DURATION, time.perf_counter() - self.started, labels)

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
            num_seal_mismatches=self.seal_mismatches,
            num_ahead_steps=self.ahead_rounds,
        )

    def timings(self) -> coordinator_pb2.Timings:
        now = time.perf_counter()
        own, wire = self._own_s, self._wire_s
        opening, proposing = ("target", names.OPEN), ("draft", names.PROPOSE)
        verifying, decoding = ("target", names.VERIFY), ("target", names.DECODE)
        return coordinator_pb2.Timings(
            time_to_first_token_us=_us((self.first_token or now) - self.started),
            total_us=_us(now - self.started),
            open_us=_us(own[opening] + wire[opening]),
            draft_us=_us(own[proposing]),
            target_us=_us(own[verifying] + own[decoding]),
            draft_wire_us=_us(wire[proposing]),
            target_wire_us=_us(wire[verifying] + wire[decoding]),
        )


@contextlib.contextmanager
def following(
    telemetry: Telemetry, metadata: Metadata | None, message: coordinator_pb2.GenerateRequest, model: str
) -> Iterator[Stats]:
    """One Generate call's stats while the block runs. metadata: of the call. model: the target's name."""
    labels = {
        names.OPERATION: "chat" if message.HasField("chat") else "text_completion",
        names.PROVIDER: "splitspec",
        names.MODEL: model,
    }
    with telemetry.tracing.request(metadata) as span:
        span.set({**labels, names.RPC_SYSTEM: "grpc", names.RPC_METHOD: _METHOD})
        stats = Stats(span, telemetry.metrics, labels)
        try:
            yield stats
        except BaseException as error:
            stats.end(error)
            raise
        stats.end(None)


def _status(error: BaseException | None) -> str:
    """The name of the gRPC status that the call ends with."""
    if error is None:
        return "OK"
    if isinstance(error, SplitspecError):
        return status_code(error).name
    return "CANCELLED" if is_cancelled(error) else "INTERNAL"


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
