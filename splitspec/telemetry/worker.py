"""What a worker shows of each message: its span, the times of its model, what it dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from protos.v1 import common_pb2, draft_pb2, target_pb2
from splitspec.telemetry import names
from splitspec.telemetry.metrics import Metrics
from splitspec.telemetry.names import SpanName
from splitspec.telemetry.process import Telemetry
from splitspec.telemetry.tracing import NO_SPAN, Span

Message = draft_pb2.DraftSessionRequest | target_pb2.TargetSessionRequest


class Work:
    """The work on one message. Tell it how the message was answered; None stands for a stale one."""

    def __init__(self, span: Span, metrics: Metrics) -> None:
        self._span = span
        self._metrics = metrics

    def opened(self, opened: common_pb2.Opened, base_length: int) -> None:
        """base_length: of the Open; an answer of less has taken over nothing."""
        fed = opened.length - opened.cached_length if opened.length == base_length else 0
        self._span.set({names.CACHED_TOKENS: opened.cached_length, names.NUM_TOKENS: fed})
        self._answered(opened.timings)

    def proposed(self, proposal: common_pb2.Proposal | None) -> None:
        if proposal is None:
            self.dropped()
            return
        self._span.set({names.DRAFTER: proposal.drafter, names.NUM_DRAFT_TOKENS: proposal.num_draft_tokens})
        self._answered(proposal.timings)

    def verified(self, verdict: common_pb2.Verdict | None) -> None:
        if verdict is None:
            self.dropped()
            return
        self._span.set(
            {
                names.NUM_DRAFT_TOKENS: verdict.num_draft_tokens,
                names.NUM_ACCEPTED: verdict.num_accepted,
                names.NUM_ONE_HOT: verdict.num_one_hot,
                names.REPEATED: verdict.repeated,
            }
        )
        self._answered(verdict.timings, repeated=verdict.repeated)

    def granted(self, num_tokens: int) -> None:
        """So many plain tokens will be drawn."""
        self._span.set({names.NUM_TOKENS: num_tokens})

    def decoded(self, verdict: common_pb2.Verdict) -> None:
        """One of them; the span is of them all, so it has no times of one."""
        self._metrics.record_timings(verdict.timings)

    def dropped(self) -> None:
        """The message was stale and gets no answer."""
        self._span.set({names.STALE: True})
        self._metrics.add(names.STALE_MESSAGES)

    def _answered(self, timings: common_pb2.ServerTimings, *, repeated: bool = False) -> None:
        self._span.set_timings(timings)
        if not repeated:  # the times of a repeated answer are those of the first one
            self._metrics.record_timings(timings)


class Watch:
    """Watches a worker's messages. spans: the span of each kind of message; kinds without one aren't seen."""

    def __init__(self, telemetry: Telemetry, worker_id: str, spans: Mapping[str, SpanName]) -> None:
        self._telemetry = telemetry
        self._worker_id = worker_id
        self._spans = spans

    @contextlib.contextmanager
    def message(self, request: Message) -> Iterator[Work]:
        """The work on a message, while the block runs."""
        name = self._spans.get(request.WhichOneof("message") or "")
        tracing = self._telemetry.tracing
        with tracing.message(name, request.trace) if name else NO_SPAN as span:
            if span.recording:
                span.set(
                    {
                        names.WORKER_ID: self._worker_id,
                        names.CONVERSATION_ID: request.stamp.session_id,
                        names.EPOCH: request.stamp.epoch,
                        names.ROUND: request.stamp.round,
                        names.BASE_LENGTH: request.stamp.base_length,
                    }
                )
                if request.open.drafter:
                    span.set({names.DRAFTER: request.open.drafter})
            yield Work(span, self._telemetry.metrics)
