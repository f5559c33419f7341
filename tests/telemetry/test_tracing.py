"""Spans: parents across processes, what isn't made when nobody traces, errors, slow rounds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from protos.v1 import common_pb2
from splitspec.errors import UnavailableError
from splitspec.telemetry import NO_SPAN, Telemetry, names
from splitspec.telemetry.process import _append_only
from splitspec.telemetry.reading import SpanRecord, read_spans
from splitspec.telemetry.tracing import Tracing
from tests.telemetry.conftest import settings

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED_CALLER = CALLER[:-2] + "00"

# A worker that gets three messages on stdin, as a stream would bring them.
WORKER = """
import sys
from protos.v1 import common_pb2
from splitspec.config import ServerSettings
from splitspec.telemetry import Telemetry, names

role = sys.argv[1]
messages = {
    "draft": [names.DRAFT_OPEN, names.DRAFT_PROPOSE],
    "target": [names.TARGET_OPEN, names.TARGET_VERIFY],
}
with Telemetry.start(ServerSettings(trace_file=sys.argv[2]), f"splitspec-{role}", f"{role}-1") as telemetry:
    for name, line in zip(messages[role], sys.stdin):
        received = common_pb2.TraceContext.FromString(bytes.fromhex(line))
        with telemetry.tracing.message(name, received) as span:
            span.set({names.WORKER_ID: f"{role}-1", names.ROUND: 1})
            span.set_timings(common_pb2.ServerTimings(queue_us=1, model_us=2, sampling_us=3, total_us=10))
"""


def run_worker(role: str, contexts: list[common_pb2.TraceContext | None], path: Path) -> None:
    lines = "".join((c or common_pb2.TraceContext()).SerializeToString().hex() + "\n" for c in contexts)
    command = [sys.executable, "-c", WORKER, role, str(path)]
    subprocess.run(command, input=lines.encode(), check=True, timeout=60)


def by_name(spans: list[SpanRecord]) -> dict[str, SpanRecord]:
    named = {span.name: span for span in spans}
    assert len(named) == len(spans)
    return named


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[Tracer]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("test")
    provider.shutdown()


def test_parents_are_right_across_three_processes_that_share_a_file(trace_file: Path) -> None:
    with Telemetry.start(settings(trace_file=str(trace_file)), "splitspec-coordinator", "c-1") as telemetry:
        with telemetry.tracing.request([("traceparent", CALLER), ("tracestate", "vendor=1")]) as request:
            request.set({names.ROUNDS_NUM_ACCEPTED: [2, 0, 4], names.FINISH_REASONS: ["eos"]})
            with request.child(names.OPEN) as opening:
                pass
            with request.child(names.ROUND_SPAN) as round_span:
                with round_span.child(names.PROPOSE) as propose:
                    propose.set_timings(common_pb2.ServerTimings(total_us=400), waited_s=0.001)
                with round_span.child(names.VERIFY) as verify:
                    pass
        run_worker("draft", [opening.to_proto(), propose.to_proto()], trace_file)
        run_worker("target", [opening.to_proto(), verify.to_proto()], trace_file)

    spans = by_name(read_spans(trace_file))
    assert {span.trace_id for span in spans.values()} == {CALLER[3:35]} == {request.trace_id}
    parents = {name: span.parent_id for name, span in spans.items()}
    assert parents.pop("request") == CALLER[36:52]
    for name, parent_id in parents.items():
        (parent,) = names.SPANS[name].parent
        assert parent_id == spans[parent].span_id
    assert {name: span.service for name, span in spans.items() if "." in name} == {
        "draft.open": "splitspec-draft",
        "draft.propose": "splitspec-draft",
        "target.open": "splitspec-target",
        "target.verify": "splitspec-target",
    }
    assert spans["request"].service == "splitspec-coordinator"
    assert spans["request"].attributes == {
        "splitspec.rounds.num_accepted": [2, 0, 4],
        "gen_ai.response.finish_reasons": ["eos"],
    }
    assert spans["propose"].attributes["splitspec.wire_us"] == 600
    assert spans["target.verify"].attributes["splitspec.server.model_us"] == 2
    assert not any(span.failed for span in spans.values())


def test_lines_of_processes_that_share_a_file_stay_whole(trace_file: Path) -> None:
    """Nothing of a line waits in a buffer, where another process's line could come between."""
    lines = [
        f"{number}{'x' * length}\n" for number, length in enumerate([10, 9_000, 100, 300_000, 8_191, 10])
    ]
    with _append_only(str(trace_file)) as one, _append_only(str(trace_file)) as other:
        for number, line in enumerate(lines):
            (one, other)[number % 2].write(line)
            assert trace_file.read_text() == "".join(lines[: number + 1])


def test_tracestate_travels_with_the_context(tracer: Tracer) -> None:
    with Tracing(tracer).request([("traceparent", CALLER), ("tracestate", "vendor=1")]) as request:
        context = request.to_proto()
    assert context is not None
    assert context.traceparent[:36] == CALLER[:36]
    assert context.tracestate == "vendor=1"


@pytest.mark.parametrize("metadata", [None, [], [("traceparent", "nonsense")], [("other", b"\xff")]])
def test_a_request_without_a_good_context_starts_a_trace(
    metadata: list[tuple[str, str | bytes]] | None, tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    with Tracing(tracer).request(metadata):
        pass
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_nothing_is_made_when_tracing_is_off() -> None:
    tracing = Telemetry.start(settings(), "splitspec-target", "t-1").tracing
    request = tracing.request([("traceparent", CALLER)])
    received = common_pb2.TraceContext(traceparent=CALLER)
    assert request is NO_SPAN
    assert request.child(names.ROUND_SPAN) is NO_SPAN
    assert tracing.message(names.TARGET_VERIFY, received) is NO_SPAN
    assert request.to_proto() is None
    assert not request.recording
    assert request.trace_id == ""
    with request as entered:
        entered.set({names.ROUND: 1})
        entered.set_timings(common_pb2.ServerTimings(), 0.1)
    assert entered is NO_SPAN
    assert not hasattr(NO_SPAN, "__dict__")


@pytest.mark.parametrize("traceparent", ["", "nonsense", UNSAMPLED_CALLER, "x" * 54 + "1"])
def test_a_worker_never_starts_a_trace(
    traceparent: str, tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    received = common_pb2.TraceContext(traceparent=traceparent)
    assert Tracing(tracer).message(names.DRAFT_PROPOSE, received) is NO_SPAN
    assert exporter.get_finished_spans() == ()


def test_an_unsampled_request_makes_no_children(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    with Tracing(tracer).request([("traceparent", UNSAMPLED_CALLER)]) as request:
        assert request.trace_id == CALLER[3:35]
        assert request.child(names.ROUND_SPAN) is NO_SPAN
        assert request.to_proto() is None
    assert exporter.get_finished_spans() == ()


def test_a_slow_round_of_an_unsampled_request_is_recorded(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    def round_of(slow_round_s: float) -> None:
        with (
            Tracing(tracer, slow_round_s).request([("traceparent", UNSAMPLED_CALLER)]) as request,
            request.child(names.ROUND_SPAN) as round_span,
        ):
            assert request.child(names.OPEN) is NO_SPAN
            assert round_span.child(names.VERIFY) is NO_SPAN
            round_span.set({names.ROUND: 7})

    round_of(slow_round_s=3600)
    assert exporter.get_finished_spans() == ()
    round_of(slow_round_s=1e-9)
    (span,) = exporter.get_finished_spans()
    assert span.name == "round"
    assert span.context is not None
    assert span.context.trace_id == int(CALLER[3:35], 16)
    assert dict(span.attributes or {}) == {"splitspec.round": 7}
    assert (span.end_time or 0) > (span.start_time or 0)


def test_an_error_marks_its_span_and_a_cancelled_one_is_no_error(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(UnavailableError), Tracing(tracer).request(None):
        raise UnavailableError("target worker t-1 didn't answer")
    with pytest.raises(asyncio.CancelledError), Tracing(tracer).request(None):
        raise asyncio.CancelledError
    failed, cancelled = exporter.get_finished_spans()
    assert dict(failed.attributes or {}) == {"error.type": "UnavailableError"}
    assert failed.status.description == "target worker t-1 didn't answer"
    assert not failed.status.is_ok
    assert dict(cancelled.attributes or {}) == {"error.type": "cancelled"}
    assert cancelled.status.is_unset
    assert failed.events == cancelled.events == ()


def test_a_killed_process_loses_only_the_last_moment(trace_file: Path) -> None:
    program = f"""
import os, signal, time
from splitspec.config import ServerSettings
from splitspec.telemetry import Telemetry
telemetry = Telemetry.start(ServerSettings(trace_file={str(trace_file)!r}), "s", "i")
with telemetry.tracing.request(None):
    pass
while not os.path.getsize({str(trace_file)!r}):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert [span.name for span in read_spans(trace_file)] == ["request"]


def test_a_full_disk_is_told_once(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with Telemetry.start(settings(trace_file="/dev/full"), "splitspec-coordinator", "c-1") as telemetry:
        for _ in range(2):
            for _ in range(600):  # more than one batch
                telemetry.tracing.request([("traceparent", CALLER)]).end()
    written = capfd.readouterr()
    said = written.out + written.err + caplog.text
    assert "Traceback" not in said
    assert said.count("No space left on device") == 1
