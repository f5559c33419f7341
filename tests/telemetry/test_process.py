"""What a process starts: OTLP by the standard variables, the Prometheus endpoint, clear refusals."""

from __future__ import annotations

import socket
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from protos.v1 import common_pb2
from splitspec.config import CoordinatorSettings
from splitspec.errors import ConfigError
from splitspec.telemetry import NO_SPAN, Telemetry, names
from tests.telemetry.conftest import Receiver, settings

VERDICT = common_pb2.Verdict(
    num_draft_tokens=4, num_accepted=2, num_one_hot=1, next_origin=common_pb2.TOKEN_ORIGIN_CORRECTION
)
PLAIN = common_pb2.Verdict(next_origin=common_pb2.TOKEN_ORIGIN_PLAIN)
LOAD = common_pb2.WorkerLoad(live_sessions=3, handles=5, kv_tokens=700, kv_bytes=90_000)


def count_everything(telemetry: Telemetry) -> None:
    """Every metric gets a value."""
    metrics = telemetry.metrics
    metrics.watch_load(lambda: LOAD)
    metrics.add_round(VERDICT)
    metrics.add_round(PLAIN)
    for metric in names.METRICS.values():
        if metric.kind is names.Kind.HISTOGRAM:
            metrics.record(metric, 0.03)


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def flushing() -> list[threading.Thread]:
    """Flushes that were left behind."""
    return [thread for thread in threading.enumerate() if thread.name == "telemetry-flush"]


def test_otlp_receiver_gets_spans_and_every_metric(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
    with Telemetry.start(settings(), "splitspec-target", "t-1") as telemetry:
        with telemetry.tracing.request(None):
            pass
        count_everything(telemetry)
    assert set(receiver.spans) == {"request"}
    assert receiver.services == {"splitspec-target"}
    assert set(receiver.metrics) == set(names.METRICS)
    for name, metric in receiver.metrics.items():
        assert metric.unit == names.METRICS[name].unit
        assert metric.description == names.METRICS[name].description
    duration = receiver.metrics["gen_ai.server.request.duration"].histogram.data_points[0]
    assert tuple(duration.explicit_bounds) == names.REQUEST_DURATION.buckets


def test_shutdown_does_not_wait_for_a_collector_that_hangs(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
    monkeypatch.setattr("splitspec.telemetry.process._FLUSH_LIMIT_S", 0.1)
    receiver.answering.clear()
    with Telemetry.start(settings(), "splitspec-target", "t-1") as telemetry:
        telemetry.tracing.request(None).end()
    assert (receiver.spans, receiver.metrics) == ({}, {})
    receiver.answering.set()
    (flush,) = flushing()
    flush.join()
    assert set(receiver.spans) == {"request"}


def test_a_collector_on_this_machine_is_not_asked_through_a_proxy(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
    with Telemetry.start(settings(), "splitspec-target", "t-1") as telemetry:
        telemetry.tracing.request(None).end()
    assert set(receiver.spans) == {"request"}
    assert receiver.metrics


def test_each_signal_follows_its_own_variables(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "renamed")
    with Telemetry.start(settings(), "splitspec-draft", "d-1") as telemetry:
        assert telemetry.tracing.request(None) is NO_SPAN
    assert receiver.spans == {}
    assert "splitspec.plain_rounds" in receiver.metrics


def test_sdk_disabled_turns_everything_off(monkeypatch: pytest.MonkeyPatch, trace_file: Path) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with Telemetry.start(settings(trace_file=str(trace_file)), "splitspec-draft", "d-1") as telemetry:
        assert telemetry.tracing.request(None) is NO_SPAN
    assert not trace_file.exists()


def test_sampling_follows_the_standard_variables(monkeypatch: pytest.MonkeyPatch, trace_file: Path) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with Telemetry.start(settings(trace_file=str(trace_file)), "splitspec-coordinator", "c-1") as telemetry:
        with telemetry.tracing.request(None) as request:
            assert not request.recording
            assert request.to_proto() is None
        caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        with telemetry.tracing.request([("traceparent", caller)]) as request:
            assert request.recording


def test_prometheus_shows_counts_levels_and_times(free_port: int) -> None:
    with Telemetry.start(settings(metrics_port=free_port), "splitspec-target", "t-1") as telemetry:
        before = scrape(free_port)
        assert before["splitspec_plain_rounds_total"] == 0
        assert "splitspec_handles" not in before
        count_everything(telemetry)
        telemetry.metrics.add_round(VERDICT)
        repeated = common_pb2.Verdict(repeated=True)
        repeated.MergeFrom(VERDICT)
        telemetry.metrics.add_round(repeated)
        telemetry.metrics.record_wire("draft", common_pb2.ServerTimings(total_us=400), 0.001)
        after = scrape(free_port)
    expected = {
        "splitspec_spec_decode_num_drafts_total": 2,
        "splitspec_spec_decode_num_draft_tokens_total": 8,
        "splitspec_spec_decode_num_accepted_tokens_total": 4,
        'splitspec_spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 2,
        'splitspec_spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 2,
        "splitspec_one_hot_tokens_total": 2,
        "splitspec_plain_rounds_total": 1,
        "splitspec_missed_rounds_total": 0,
        "splitspec_live_sessions": 3,
        "splitspec_handles": 5,
        "splitspec_kv_tokens": 700,
        "splitspec_kv_memory_bytes": 90_000,
        "gen_ai_server_time_to_first_token_seconds_count": 1,
        'gen_ai_server_time_to_first_token_seconds_bucket{le="0.02"}': 0,
        'gen_ai_server_time_to_first_token_seconds_bucket{le="0.04"}': 1,
        'splitspec_wire_duration_seconds_bucket{le="0.0005",splitspec_role="draft"}': 0,
        'splitspec_wire_duration_seconds_bucket{le="0.001",splitspec_role="draft"}': 1,
    }
    assert {name: after.get(name) for name in expected} == expected
    assert not any('position="2"' in name for name in after)
    with pytest.raises(OSError, match="refused"):
        scrape(free_port)
    assert flushing() == []


def test_a_taken_port_is_named(free_port: int, trace_file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        both = settings(metrics_port=free_port, trace_file=str(trace_file))
        with pytest.raises(ConfigError, match=rf"--metrics-port \(SPLITSPEC_METRICS_PORT\).*{free_port}"):
            Telemetry.start(both, "splitspec-target", "t-1")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("OTEL_TRACES_EXPORTER", "jaeger", "OTEL_TRACES_EXPORTER is 'jaeger', expected otlp or none"),
        ("OTEL_METRICS_EXPORTER", "console", "OTEL_METRICS_EXPORTER is 'console', expected otlp or none"),
        (
            "OTEL_EXPORTER_OTLP_PROTOCOL",
            "http/protobuf",
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/protobuf', expected grpc",
        ),
    ],
)
def test_a_variable_that_cannot_be_followed_is_refused(
    variable: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as refusal:
        Telemetry.start(settings(), "splitspec-target", "t-1")
    assert str(refusal.value) == expected


def test_a_trace_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace-file \(SPLITSPEC_TRACE_FILE\).*expected a file"):
        Telemetry.start(settings(trace_file=str(tmp_path / "missing" / "t.jsonl")), "s", "i")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, trace_file: Path) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.json.file.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'splitspec\[telemetry\]'"):
        Telemetry.start(settings(trace_file=str(trace_file)), "s", "i")


def test_counts_of_a_process_that_shows_them_nobody() -> None:
    count_everything(Telemetry.start(CoordinatorSettings(model="m"), "splitspec-coordinator", "c-1"))
