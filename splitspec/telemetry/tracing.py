"""Spans that cost nothing when nobody traces, and their context in our messages.

    Span               no trace: every method returns at once; NO_SPAN is the only one
    ├── _Recorded      a sampled trace: spans of the SDK
    ├── _Unsampled     a trace that isn't sampled: no children, but slow rounds are recorded
    └── _Watched       a round of such a trace: becomes a span only if it was slow

Parents are passed by hand (`span.child`), never through context variables: rounds are an async generator,
deliveries run beside them, and both would see each other's span.

A recorded span costs about 50 microseconds, so a request carries per-round numbers as arrays on its own
span. There are no span events: they are on their way out, and the SDK keeps 128 of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from protos.v1 import common_pb2
from splitspec.telemetry import names
from splitspec.telemetry.names import Attribute, SpanName

Value = str | bool | int | float | Sequence[str] | Sequence[float]
Attributes = Mapping[Attribute, Value]
Metadata = Iterable[tuple[str, str | bytes]]

_PROPAGATOR = TraceContextTextMapPropagator()
#: Length of a traceparent of version 00; the last two digits are its flags.
_TRACEPARENT_LENGTH = 55


class Span:
    """A span that isn't there, and the interface of those that are. Use it as a context manager, or `end` it.

    An error that leaves the block marks the span; a cancelled one has error.type "cancelled" and no
    error status.
    """

    __slots__ = ()

    #: Whether what is set here is kept: ask before computing something only for a span.
    recording: bool = False
    #: Trace id as 32 hexadecimal digits, for logs; empty when nothing is traced.
    trace_id: str = ""

    def child(self, name: SpanName) -> Span:
        """A span that starts now, with this one as its parent."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Add attributes. Nothing happens when nothing is recorded."""

    def set_timings(self, timings: common_pb2.ServerTimings, waited_s: float | None = None) -> None:
        """Add the server's own durations, and with the caller's wait (seconds) what the wire took of it."""

    def fail(self, error: BaseException) -> None:
        """Mark the span with the error that ended it."""

    def end(self) -> None:
        """End the span now."""

    def to_proto(self) -> common_pb2.TraceContext | None:
        """The context to put in a message, so that the worker's span becomes a child; None for no trace."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.end()


NO_SPAN = Span()


class _Recorded(Span):
    __slots__ = ("_context", "_span", "_tracer")

    recording = True

    def __init__(
        self,
        tracer: Tracer,
        name: SpanName,
        parent: Context,
        start_ns: int | None = None,
    ) -> None:
        self._tracer = tracer
        self._span = tracer.start_span(name.name, parent, name.kind, start_time=start_ns)
        self._context = trace.set_span_in_context(self._span, Context())

    @property
    def trace_id(self) -> str:  # type: ignore[override]
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    def child(self, name: SpanName) -> Span:
        return _Recorded(self._tracer, name, self._context)

    def set(self, attributes: Attributes) -> None:
        for attribute, value in attributes.items():
            self._span.set_attribute(attribute.name, value)

    def set_timings(self, timings: common_pb2.ServerTimings, waited_s: float | None = None) -> None:
        values: dict[Attribute, Value] = {
            names.QUEUE_US: timings.queue_us,
            names.MODEL_US: timings.model_us,
            names.SAMPLING_US: timings.sampling_us,
            names.TOTAL_US: timings.total_us,
        }
        if waited_s is not None:
            values[names.WIRE_US] = max(0, round(waited_s * 1e6) - timings.total_us)
        self.set(values)

    def fail(self, error: BaseException) -> None:
        self.set({names.ERROR_TYPE: error_type(error)})
        if not is_cancelled(error):
            self._span.set_status(Status(StatusCode.ERROR, str(error)))

    def end(self) -> None:
        self._span.end()

    def to_proto(self) -> common_pb2.TraceContext:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        return common_pb2.TraceContext(
            traceparent=carrier["traceparent"], tracestate=carrier.get("tracestate", "")
        )


class _Unsampled(Span):
    __slots__ = ("_context", "_slow_ns", "_tracer")

    def __init__(self, tracer: Tracer, context: SpanContext, slow_ns: int) -> None:
        self._tracer = tracer
        self._context = context
        self._slow_ns = slow_ns

    @property
    def trace_id(self) -> str:  # type: ignore[override]
        return trace.format_trace_id(self._context.trace_id)

    def child(self, name: SpanName) -> Span:
        if self._slow_ns and name.kept_when_slow:
            return _Watched(self._tracer, name, self._context, self._slow_ns)
        return NO_SPAN


class _Watched(Span):
    __slots__ = ("_attributes", "_context", "_error", "_name", "_slow_ns", "_start_ns", "_tracer")

    recording = True

    def __init__(self, tracer: Tracer, name: SpanName, context: SpanContext, slow_ns: int) -> None:
        self._tracer = tracer
        self._name = name
        self._context = context
        self._slow_ns = slow_ns
        self._attributes: dict[Attribute, Value] = {}
        self._error: BaseException | None = None
        self._start_ns = time.time_ns()

    def child(self, name: SpanName) -> Span:
        return NO_SPAN

    def set(self, attributes: Attributes) -> None:
        self._attributes.update(attributes)

    def fail(self, error: BaseException) -> None:
        self._error = error

    def end(self) -> None:
        if time.time_ns() - self._start_ns < self._slow_ns:
            return
        # In the request's trace, whose id a log may have; the sampler follows the parent's flag.
        parent = SpanContext(
            self._context.trace_id, self._context.span_id, False, TraceFlags(TraceFlags.SAMPLED)
        )
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
        span = _Recorded(self._tracer, self._name, context, start_ns=self._start_ns)
        span.set(self._attributes)
        if self._error is not None:
            span.fail(self._error)
        span.end()


class Tracing:
    """Where spans begin: a request at the coordinator, a message at a worker. tracer: None traces nothing.

    slow_round_s: rounds that take as long are recorded although their request isn't sampled; 0 for none.
    """

    def __init__(self, tracer: Tracer | None, slow_round_s: float = 0.0) -> None:
        self._tracer = tracer
        self._slow_ns = round(slow_round_s * 1e9)

    def request(self, metadata: Metadata | None) -> Span:
        """The span of one Generate call, a child of the caller's when the gRPC metadata has a traceparent."""
        if self._tracer is None:
            return NO_SPAN
        carrier = {key: str(value) for key, value in metadata or () if key in _PROPAGATOR.fields}
        parent = _PROPAGATOR.extract(carrier, Context())
        span = _Recorded(self._tracer, names.REQUEST, parent)
        context = span._span.get_span_context()
        return span if context.trace_flags.sampled else _Unsampled(self._tracer, context, self._slow_ns)

    def message(self, name: SpanName, received: common_pb2.TraceContext) -> Span:
        """The span of a worker's work on one message, a child of the span that the message carries.

        A message without a sampled context makes none: only the coordinator starts traces.
        """
        if self._tracer is None or not _is_sampled(received.traceparent):
            return NO_SPAN
        carrier = {"traceparent": received.traceparent, "tracestate": received.tracestate}
        parent = _PROPAGATOR.extract(carrier, Context())
        if not trace.get_current_span(parent).get_span_context().is_valid:
            return NO_SPAN
        return _Recorded(self._tracer, name, parent)


def is_cancelled(error: BaseException) -> bool:
    """Somebody left: no failure of what was going on."""
    return isinstance(error, asyncio.CancelledError | GeneratorExit)


def error_type(error: BaseException) -> str:
    """The value of error.type."""
    return "cancelled" if is_cancelled(error) else type(error).__name__


def _is_sampled(traceparent: str) -> bool:
    """The flag that says so; the propagator checks the rest."""
    return len(traceparent) >= _TRACEPARENT_LENGTH and traceparent[_TRACEPARENT_LENGTH - 1] in "13579bdf"
