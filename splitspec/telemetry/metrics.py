"""Metrics: plain integers for counters, histograms for durations, callbacks for levels.

A counter of the SDK costs about 8 microseconds, a round would touch ten of them, and an integer costs a
tenth of one. So counters are integers of this process, read when somebody collects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.metrics import Histogram, Meter, NoOpMeter, Observation

from protos.v1 import common_pb2
from splitspec.telemetry import names
from splitspec.telemetry.names import Attribute, Kind, Metric

Labels = Mapping[Attribute, str]
Read = Callable[[], int]


class Metrics:
    """All metrics of one process; the instruments are made once. meter: None collects nothing.

    Counts come from the event loop and are read by the exporter's thread.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        meter = meter or NoOpMeter("splitspec")
        self._counts: dict[Metric, Counter[int | None]] = {}
        self._histograms: dict[Metric, Histogram] = {}
        self._levels: dict[Metric, Read] = {}
        for metric in names.METRICS.values():
            self._create(meter, metric)

    def add(self, metric: Metric, amount: int = 1, position: int | None = None) -> None:
        """Count. position: for the metric by position only."""
        self._counts[metric][position] += amount

    def record(self, metric: Metric, seconds: float, labels: Labels | None = None) -> None:
        """A point of a histogram."""
        attributes = {attribute.name: value for attribute, value in labels.items()} if labels else None
        self._histograms[metric].record(seconds, attributes)

    def add_round(self, verdict: common_pb2.Verdict) -> None:
        """Count a round by its verdict; repeated ones were counted before."""
        if verdict.repeated:
            return
        if verdict.next_origin == common_pb2.TOKEN_ORIGIN_PLAIN:
            self.add(names.PLAIN_ROUNDS)
            return
        self.add(names.NUM_DRAFTS)
        self.add(names.NUM_DRAFTED_TOKENS, verdict.num_draft_tokens)
        self.add(names.NUM_ACCEPTED_TOKENS, verdict.num_accepted)
        self.add(names.ONE_HOT_TOKENS, verdict.num_one_hot)
        self.add(names.SEAL_MISMATCHES, int(verdict.seal_mismatch))
        for position in range(verdict.num_accepted):
            self.add(names.NUM_ACCEPTED_TOKENS_PER_POS, position=position)

    def record_timings(self, timings: common_pb2.ServerTimings) -> None:
        """A worker's queue wait and model time for one message."""
        self.record(names.QUEUE_DURATION, timings.queue_us / 1e6)
        self.record(names.MODEL_DURATION, timings.model_us / 1e6)

    def record_wire(self, role: str, timings: common_pb2.ServerTimings, waited_s: float) -> None:
        """What the wire took of the coordinator's wait for a worker of that role."""
        wire_s = max(0.0, waited_s - timings.total_us / 1e6)
        self.record(names.WIRE_DURATION, wire_s, {names.ROLE: role})

    def watch(self, metric: Metric, read: Read) -> None:
        """Read a gauge's level by `read` whenever somebody collects; called on the exporter's thread."""
        assert metric.kind is Kind.GAUGE, f"{metric.name} is no gauge"
        self._levels[metric] = read

    def watch_load(self, read: Callable[[], common_pb2.WorkerLoad]) -> None:
        """Read a worker's gauges from its load."""
        self.watch(names.LIVE_SESSIONS, lambda: read().live_sessions)
        self.watch(names.HANDLES, lambda: read().handles)
        self.watch(names.KV_TOKENS, lambda: read().kv_tokens)
        self.watch(names.KV_MEMORY, lambda: read().kv_bytes)
        self.watch(names.KV_BLOCKS_USED, lambda: read().kv_blocks_used)
        self.watch(names.KV_BLOCKS_SHARED, lambda: read().kv_blocks_shared)
        self.watch(names.KV_BLOCKS_CACHED, lambda: read().kv_blocks_cached)
        self.watch(names.KV_BLOCKS_FREE, lambda: read().kv_blocks_free)

    def _create(self, meter: Meter, metric: Metric) -> None:
        if metric.kind is Kind.HISTOGRAM:
            self._histograms[metric] = meter.create_histogram(
                metric.name,
                metric.unit,
                metric.description,
                explicit_bucket_boundaries_advisory=metric.buckets,
            )
        elif metric.kind is Kind.COUNTER:
            counts: Counter[int | None] = Counter()
            if names.POSITION not in metric.attributes:
                counts[None] = 0  # seen as 0 from the start, so that rates are right
            self._counts[metric] = counts
            meter.create_observable_counter(
                metric.name, [lambda _: _observe_counts(counts)], metric.unit, metric.description
            )
        else:
            meter.create_observable_gauge(
                metric.name, [lambda _: self._observe_level(metric)], metric.unit, metric.description
            )

    def _observe_level(self, metric: Metric) -> Iterable[Observation]:
        read = self._levels.get(metric)
        return [Observation(read())] if read else []


def _observe_counts(counts: Counter[int | None]) -> Iterable[Observation]:
    # dict() copies at once, so that the event loop may count on meanwhile.
    return [
        Observation(count, None if position is None else {names.POSITION.name: position})
        for position, count in dict(counts).items()
    ]
